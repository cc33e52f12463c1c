"""A checked request, as all its samples see it. Plain values; does not know the public API's messages."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TypeAlias

from specdec.core.rounds import CACHE_SALT, GRAMMAR, LOGPROBS, RESTRICTIONS, TRANSFORMS
from specdec.core.sequence import Method, Priority, SamplingParams
from specdec.sampling.grammar import Compiled

Ids: TypeAlias = "array[int]"
"""Token ids, of type "I": a tuple takes nine times the memory."""


_BLOCK, _NAMING_BLOCKS = 16, 16
"""Ids of a block, as in the KV caches, and blocks of the prefix that names replicas, at most."""


def no_ids() -> Ids:
    return array("I")


def prefixes_of(prompt_ids: Ids, salt: bytes) -> tuple[bytes, ...]:
    """Equal for prompts that begin with the same blocks, and with the same ``salt``: the prefix that names replicas,
    and longer ones, up to all blocks, each by a sixteenth. None of a prompt shorter than a block.

    The first one has a power of two of blocks, so that a conversation has another one only where it doubles, and none
    after 256 ids: until then little is lost. More blocks would part conversations that share a long system prompt. By a
    longer one each of them is found again where its last turn was.
    """
    num_blocks = len(prompt_ids) // _BLOCK
    if not num_blocks:
        return ()
    last = 1 << (min(num_blocks, _NAMING_BLOCKS).bit_length() - 1)
    text = blake2b(prompt_ids[: _BLOCK * last].tobytes(), digest_size=16, key=blake2b(salt, digest_size=16).digest())
    prefixes = [text.digest()]
    while last >= _NAMING_BLOCKS and (end := last + last // _NAMING_BLOCKS) <= num_blocks:
        text.update(prompt_ids[_BLOCK * last : _BLOCK * end].tobytes())
        prefixes.append(text.digest())
        last = end
    return tuple(prefixes)


@dataclass(frozen=True, slots=True)
class Stops:
    """What ends an output. ``included``: the stop string or stop token that ends it is a part of it."""

    max_tokens: int
    strings: tuple[str, ...] = ()
    token_ids: frozenset[int] = frozenset()
    included: bool = False


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What is returned. ``num_logprobs``, ``num_prompt_logprobs``: most likely tokens next to each token of the output
    and of the prompt; None: no logprobs."""

    num_samples: int = 1
    skip_special_tokens: bool = True
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    prompt: bool = False
    rounds: bool = False


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """How draft tokens are proposed and verified.

    ``num_tokens``: per round; None: adaptive. ``prediction``: ids that the output is expected to repeat. ``grammar``:
    that of the sampling, compiled for the tokens that it forces.
    """

    method: Method = Method.COUPLED
    num_tokens: int | None = None
    prediction: Ids = field(default_factory=no_ids)
    grammar: Future[Compiled] | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """The name of the caller's account; the owner: only its requests are proposed what these samples write; and the
    salt of cached prompts."""

    account: str = ""
    owner: bytes = b""
    cache_salt: bytes = b""


@dataclass(frozen=True, slots=True)
class Request:
    """A checked request, with every default filled in. ``resume``: output ids that the client has, by sample.
    ``adapter``: one of the target's; empty: none. ``prefixes``: see ``prefixes_of``."""

    prompt_ids: Ids
    sampling: SamplingParams
    stops: Stops
    output: OutputOptions = OutputOptions()
    drafting: DraftOptions = field(default_factory=DraftOptions)
    seed: int = 0
    resume: Mapping[int, Ids] = field(default_factory=dict)
    caller: Caller = Caller()
    adapter: str = ""
    priority: Priority = Priority.STANDARD
    prefixes: tuple[bytes, ...] = ()

    @property
    def num_given_ids(self) -> int:
        """What the caller sent to be read: prompt, prediction, and the output to resume."""
        return len(self.prompt_ids) + len(self.drafting.prediction) + sum(map(len, self.resume.values()))

    @property
    def keyed_by_token(self) -> bool:
        """See specdec.core.sequence.Method."""
        return self.drafting.method.keyed_by_token(self.sampling.temperature)

    @property
    def needs(self) -> frozenset[str]:
        """Capabilities that its target must have."""
        needed = {
            TRANSFORMS: self.sampling.transforms,
            RESTRICTIONS: self.sampling.restricts,
            GRAMMAR: bool(self.sampling.grammar),
            LOGPROBS: self.output.num_logprobs is not None or self.output.num_prompt_logprobs is not None,
        }
        return self.draft_needs | {capability for capability, is_needed in needed.items() if is_needed}

    @property
    def draft_needs(self) -> frozenset[str]:
        """Capabilities that its draft must have. A draft without the others is allowed: it only guesses worse."""
        return frozenset({CACHE_SALT} if self.caller.cache_salt else ())
