"""lm-eval: the numbers of a tiny task are the same with speculation and without."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.clients import scene
from tests.clients.scene import MODEL, Servers, equal

TASK = {
    "task": "tiny",
    "dataset_path": "json",
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 24, "temperature": 0.0},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    "test_split": "test",
}


def exact_match(servers: Servers, directory: Path, settings: str) -> float:
    """Of two questions: one is answered with the greedy text, the other is not."""
    server = f"base_url={servers.demo}/completions,tokenizer_backend=remote,num_concurrent=1"
    command = [str(Path(sys.executable).parent / "lm_eval"), "--model=local-completions", "--tasks=tiny"]
    command += [f"--model_args=model={MODEL},{server}", f"--gen_kwargs=temperature=0{settings}"]
    output = directory / f"out{settings}"
    command += [f"--include_path={directory}", f"--output_path={output}"]
    subprocess.run(command, check=True, capture_output=True)
    [file] = output.rglob("results_*.json")
    results = json.loads(file.read_text())["results"]["tiny"]
    value: float = next(value for name, value in results.items() if name.startswith("exact_match,"))
    return value


def same_numbers_without_speculation(servers: Servers) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        line = scene.completed(servers).split("\n")[0]
        questions = [{"question": scene.PROMPT, "answer": line}, {"question": "x", "answer": "no"}]
        data = directory / "data.jsonl"
        data.write_text("\n".join(map(json.dumps, questions)))
        task = TASK | {"dataset_kwargs": {"data_files": {"test": str(data)}}}
        (directory / "tiny.yaml").write_text(json.dumps(task))
        equal([exact_match(servers, directory, settings) for settings in ("", ",num_draft_tokens=0")], [0.5, 0.5])


if __name__ == "__main__":
    scene.run("lm-eval", same_numbers_without_speculation)
