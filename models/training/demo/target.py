"""Makes the demo pair's tokenizer and target, and the texts that its draft is distilled from.

python -m models.training.demo.target --minutes 56 --output models/demo --texts DIRECTORY
specdec train draft --target models/demo/target --answers DIRECTORY --output models/demo/draft ...
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch.nn.functional as F
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from torch import Tensor

from models.training import texts
from models.training.demo import corpus
from models.training.distill import RowLoss, add_gradients, new_model
from models.training.loop import Flags, parser_of, report, train
from models.training.texts import Batch

VOCABULARY = 4096
CONTEXT = 2048
PROMPT_TOKENS = 16
"""With which a window of the corpus begins. Windows that begin alike are not both learned from and held out."""


class TargetFlags(Flags):
    texts: Path
    hidden: int
    layers: int
    feed_forward: int


def new_tokenizer(documents: Iterable[corpus.Document]) -> Tokenizer:
    """A byte-level BPE tokenizer of the documents. Encoding and decoding leave every string unchanged."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[corpus.END_OF_TEXT],
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write tokenizer.json, and the configuration that transformers needs to load it from the directory."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": corpus.END_OF_TEXT,
        "eos_token": corpus.END_OF_TEXT,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def cross_entropy(batch: Batch) -> RowLoss:
    """With the text, in nats."""
    next_ids = batch.ids[batch.is_answer]
    return lambda logits, rows: F.cross_entropy(logits, next_ids[rows], reduction="sum")


def parse() -> TargetFlags:
    parser = parser_of("models.training.demo.target", "Make the demo pair's target.", 0.025, 0.006)
    parser.add_argument("--texts", type=Path, required=True, help="directory for the texts of the draft")
    parser.add_argument("--hidden", type=int, default=320)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--feed-forward", type=int, default=864)
    parser.set_defaults(batch_tokens=6156)
    return parser.parse_args(namespace=TargetFlags())


def main() -> None:
    flags = parse()
    documents, _ = corpus.load()
    tokenizer = new_tokenizer(documents)
    windows = corpus.windows(documents, tokenizer, first=PROMPT_TOKENS)
    directory = flags.output / "target"
    for folder in (directory, flags.texts):
        folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, directory)
    texts.save(windows, flags.texts, number=0)
    end = tokenizer.token_to_id(corpus.END_OF_TEXT)
    model = new_model(
        flags.hidden,
        flags.layers,
        flags.feed_forward,
        vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT,
        bos_token_id=end,
        eos_token_id=end,
    )
    report(f"{model.num_parameters()} parameters, {len(windows)} windows of {corpus.WINDOW} tokens")

    def learn(batch: Batch) -> Tensor:
        with flags.autocast():
            return add_gradients(model, batch, cross_entropy(batch))

    num_tokens = train(model, windows, learn, flags=flags, seconds=flags.minutes * 60)
    model.bfloat16().save_pretrained(directory)
    report(json.dumps({"tokens": num_tokens, "parameters": model.num_parameters()}))


if __name__ == "__main__":
    main()
