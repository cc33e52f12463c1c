"""``python -m tests.specdec.backends.cuda.compiled``: every kernel compiled for an H100 or H200, which needs no GPU.

Prints a table: registers of a thread, bytes of its stack and of the shared memory of a program, and how many
instructions multiply matrices and copy ahead. Triton's own launcher tells the compiler which pointers and strides are
multiples of 16; here that is said by hand, because without it another kernel is compiled.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from specdec.backends.cuda import launches
from specdec.backends.cuda.plan import ROWS, RUN

CAPABILITY = 90
POINTERS = {
    **dict.fromkeys(["query", "key", "value", "keys", "values", "out", "logits"], "*bf16"),
    **dict.fromkeys(["slots", "chains", "chain_rows", "items", "blocks", "tokens", "part_tokens"], "*i32"),
    **dict.fromkeys(["part_top", "part_total", "part_acc"], "*fp32"),
    **dict.fromkeys(["seeds", "positions"], "*i64"),
    **dict.fromkeys(["temperatures", "scores", "part_scores"], "*fp64"),
}
STRIDES = ("key_row", "key_head", "value_row", "value_head", "query_row", "query_head", "out_row", "out_head")
NUMBERS = {"scale": "fp32", "softcap": "fp32", "window": "i32", "vocab_size": "i32", "num_parts": "i32"}


class Compiled(NamedTuple):
    name: str
    registers: int
    stack: int
    shared: int
    products: int
    copies: int


def compiled(name: str, label: str, constants: dict[str, Any], **options: int) -> Compiled:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from specdec.backends.cuda import kernels

    kernel = getattr(kernels, name)
    signature = {argument: kind_of(argument, constants) for argument in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, of in enumerate(kernel.arg_names) if of in (*POINTERS, *STRIDES)}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    result: Any = compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=options)
    ptx = result.asm["ptx"]
    products = len(re.findall(r"wgmma.mma_async|mma.sync", ptx))
    registers, stack = usage(result.asm["cubin"])
    return Compiled(label, registers, stack, result.metadata.shared, products, ptx.count("cp.async"))


def kind_of(argument: str, constants: dict[str, Any]) -> str:
    if argument in constants:
        return "constexpr"
    return POINTERS.get(argument) or NUMBERS.get(argument) or "i32"


def usage(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+)", text), re.search(r"STACK:(\d+)", text)
    assert registers, text
    assert stack, text
    return int(registers[1]), int(stack[1])


def all_kernels() -> list[Compiled]:
    """For attention by lanes of a program and numbers of a head."""
    import triton.language as tl

    table = []
    for heads, width in itertools.product((2, 4, 8), (64, 128, 256)):
        sizes = dict(KV_HEADS=8, GROUPS=heads, D=width, WIDTH=width, ROWS=ROWS, HEADS=heads)
        attend = sizes | dict(BLOCK=16, RUN=RUN, STEP=launches.STEP, DOT=tl.bfloat16, SOFTCAP=False)
        label, warps = f"{ROWS * heads} x {width}", launches.num_warps(ROWS * heads)
        table.append(compiled("attend", f"attend, {label}", attend, num_warps=warps))
        table.append(compiled("combine", f"combine, {label}", sizes))
    table.append(compiled("store", "store", dict(KV_HEADS=8, D=128, WIDTH=1024)))
    sizes = dict(BLOCK=launches.TOKENS)
    table += [compiled("race", f"race, {count} leaders", sizes | dict(COUNT=count)) for count in (1, 8)]
    table += [compiled("leaders", f"leaders, {count}", dict(PARTS=128 * count, COUNT=count)) for count in (1, 8)]
    return table


def main() -> None:
    table = all_kernels()
    print(f"{'kernel':20}{'registers':>10}{'stack':>8}{'shared':>9}{'products':>10}{'copies':>8}")
    for row in table:
        print(f"{row.name:20}{row.registers:>10}{row.stack:>8}{row.shared:>9}{row.products:>10}{row.copies:>8}")
    wrong = [row.name for row in table if row.stack or row.shared > 227 * 1024]
    wrong += [row.name for row in table if row.name.startswith("attend") and not (row.products and row.copies)]
    sys.exit(f"spilled registers, too much shared memory or no pipeline: {wrong}" if wrong else 0)


if __name__ == "__main__":
    main()
