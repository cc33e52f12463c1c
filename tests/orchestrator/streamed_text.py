"""Tokenizers of three kinds, ids for them, and what their streamed text must be: everything decoded again each time."""

from __future__ import annotations

from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from orchestrator.text import Origin, Output
from tests.checkout import TOKENIZER

END = 0  # <|endoftext|>, special: without text


def demo() -> Tokenizer:
    return Tokenizer.from_file(str(TOKENIZER))


def sentencepiece() -> Tokenizer:
    """As Llama 2 has it: words with a leading "▁", and every byte as a token of its own."""
    words = ["<s>", "▁", "▁the", "▁a", "a", "b", "▁b", "\n", "é", "▁日"]
    vocab = {word: index for index, word in enumerate(words)}
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    made = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<s>"))
    made.add_special_tokens([AddedToken("<s>", special=True)])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def mixed() -> Tokenizer:
    """Byte-level with tokens that hold a whole character and part of the next, as GPT-2's has."""
    # In the byte-level alphabet: Ġ is a space, ð Ł ĺ Ģ the four bytes of 😀, Ã © those of é.
    words = ["a", "b", "Ġ", "ð", "Ł", "ĺ", "Ģ", "Ã", "©", "Ġð", "að", "©a", "Ģb", "ŁĺĢ", "©Ã"]
    made = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    made.decoder = decoders.ByteLevel()
    return made


TOKENIZERS = {"demo": demo(), "sentencepiece": sentencepiece(), "mixed": mixed()}
SIZES = {name: max(t.get_vocab().values()) + 1 for name, t in TOKENIZERS.items()}
FIRST_BYTE = TOKENIZERS["sentencepiece"].token_to_id("<0x00>")
SNIPPETS = ["def f(x):", "\n", "  ", "é", "e\u0301", "😀", "👩‍👩‍👧", "日本語", "ß", "\u200d", "return", "\ufffd"]


def whole(tokenizer: Tokenizer, ids: list[int]) -> str | None:
    """The text of the ids; None while its end is not a whole character."""
    text = tokenizer.decode(ids, skip_special_tokens=True)
    return None if text.endswith("\ufffd") else text


def reference(tokenizer: Tokenizer, ids: list[int], stops: list[str]) -> tuple[str, list[int], list[int], str | None]:
    """Text, ids, text ends and the stop found, by decoding everything again after every token."""
    text, ends = "", []
    for count in range(1, len(ids) + 1):
        now = whole(tokenizer, ids[:count])
        ends.append(None)
        if now is None or now == text:
            continue
        text = now
        ends = [len(text) if end is None else end for end in ends]
        if found := [(text.find(stop), stop) for stop in stops if stop in text]:
            start, stop = min(found)
            kept = sum(end <= start for end in ends)
            return text[:start], ids[:kept], ends[:kept], stop
    full = tokenizer.decode(ids, skip_special_tokens=True)
    if full.startswith(text):
        text += full[len(text) :].rstrip("\ufffd")
    if found := [(text.find(stop), stop) for stop in stops if stop in text]:
        start, stop = min(found)
        kept = sum(end is not None and end <= start for end in ends)
        return text[:start], ids[:kept], ends[:kept], stop
    return text, ids, [len(text) if end is None else end for end in ends], None


def stream(tokenizer: Tokenizer | None, ids: list[int], stops=(), prompt=(), take_every: int = 1):
    """Text, ids, text ends and the stop, as a client puts the pieces together; and the pieces."""
    output, pieces, stop = Output(tokenizer, list(prompt), list(stops)), [], None
    for number, token_id in enumerate(ids):
        stop = output.push(token_id, Origin.DRAFT)
        if stop is not None:
            break
        if number % take_every == 0:
            pieces.append(output.release())
    else:
        stop = output.finish()
    pieces.append(output.release(finished=True))
    text = "".join(piece.text for piece in pieces)
    sent = [token_id for piece in pieces for token_id in piece.token_ids]
    ends = [end for piece in pieces for end in piece.text_ends]
    return text, sent, ends, stop, pieces


@st.composite
def texts(draw, name: str) -> list[int]:
    """Ids of sensible text, mixed with ids at random and with single bytes."""
    tokenizer, ids = TOKENIZERS[name], []
    for _ in range(draw(st.integers(0, 5))):
        if name == "sentencepiece":
            # Its decoder takes back a run of bytes once one that is no UTF-8 follows: see the test of that.
            snippet = draw(st.sampled_from(SNIPPETS)).encode()
            ids += [FIRST_BYTE + byte for byte in snippet] + draw(st.lists(st.integers(0, FIRST_BYTE - 1), max_size=4))
        elif name == "demo" and draw(st.booleans()):
            ids += tokenizer.encode(draw(st.sampled_from(SNIPPETS))).ids
        elif name == "demo" and draw(st.booleans()):
            ids += draw(st.lists(st.integers(1, 260), max_size=4))
        else:
            ids += draw(st.lists(st.integers(0, SIZES[name] - 1), max_size=4))
    return ids
