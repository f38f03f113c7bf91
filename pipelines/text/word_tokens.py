"""Makes token sequences of texts that options name: words that may not appear, and the breakers of DRY."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import openvino_genai as genai

from staticllm.pipelines.generation.options.resolve import GenerationOptions
from staticllm.pipelines.generation.options.table import SamplingParams, TokenSequences

MAX_BREAKER_CHARS = 32


class WordTokens:
    """The token sequences of texts, by tokenizer. Any thread may call; what was found is kept."""

    def __init__(self, tokenizer: genai.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._words: dict[str, TokenSequences] = {}
        self._breakers: dict[str, TokenSequences] = {}
        self._texts: list[str] = []

    def complete(self, options: GenerationOptions) -> SamplingParams:
        """Return the sampling parameters of ``options`` with the tokens of their texts."""
        sampling, extra = options.sampling, options.extra
        if extra.bad_words:
            found = (sequence for word in extra.bad_words for sequence in self.of_word(word))
            sampling = replace(sampling, bad_words=(*sampling.bad_words, *found))
        if sampling.uses_dry:
            breakers = {sequence for text in extra.dry_sequence_breakers for sequence in self.of_breaker(text)}
            sampling = replace(sampling, dry_breakers=tuple(sorted(breakers)))
        return sampling

    def of_word(self, word: str) -> TokenSequences:
        """Return the sequences that write ``word``, at the beginning of a text and after a space."""
        if word not in self._words:
            found = {self._encoded(word), self._encoded(" " + word.lstrip(" "))}
            self._words[word] = tuple(sorted(sequence for sequence in found if sequence))
        return self._words[word]

    def of_breaker(self, text: str) -> TokenSequences:
        """Return the sequences that write a text which contains ``text``, as llamacpp finds them.

        These are all tokens whose text contains it, and all whose text ends with a part of it, followed by the tokens of the
        rest.
        """
        text = text[:MAX_BREAKER_CHARS]
        if text not in self._breakers:
            self._breakers[text] = tuple(sorted(self._found_breakers(text)))
        return self._breakers[text]

    def _found_breakers(self, text: str) -> set[tuple[int, ...]]:
        found: set[tuple[int, ...]] = set()
        by_ending: dict[int, list[int]] = defaultdict(list)  # tokens by how much of the text they end with
        for token, piece in enumerate(self._token_texts()):
            if text in piece:
                found.add((token,))
                continue
            for length in range(1, len(text)):
                if piece.endswith(text[:length]):
                    by_ending[length].append(token)
        for length, tokens in by_ending.items():
            rest = self._encoded(text[length:])
            found.update((token, *rest) for token in tokens)
        return found

    def _token_texts(self) -> list[str]:
        """Return the text of every token."""
        if not self._texts:
            ids = [[token] for token in range(max(self._tokenizer.get_vocab().values(), default=-1) + 1)]
            self._texts = list(self._tokenizer.decode(ids, skip_special_tokens=False))
        return self._texts

    def _encoded(self, text: str) -> tuple[int, ...]:
        ids = self._tokenizer.encode(text, add_special_tokens=False).input_ids.data
        return tuple(int(token) for token in ids.reshape(-1))
