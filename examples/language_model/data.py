"""The sources of Python's standard library, as tokens."""

import collections
import hashlib
import re
import sysconfig
from pathlib import Path

import numpy as np

from examples.common.settings import SettingError
from examples.language_model.config import Config

# A token is a word with the space before it, or the characters between words.
WORDS = re.compile(rb" ?[A-Za-z]+|\d+|\n *| +|[^\w\s]+|.", re.DOTALL)
BYTES = 256
VALIDATION_SHARE = 1 / 20
NOT_THE_LIBRARY = {
    "..",
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "__pycache__",
}


class Tokenizer:
    """Frequent words are one token each; the others are spelled, a token per byte.

    Any text has tokens, so that perplexities count all of it.

    Args:
      sources: The texts whose words are counted.
      vocabulary: The number of tokens, of which 256 are the bytes.
    """

    def __init__(self, sources: list[bytes], vocabulary: int):
        counts = collections.Counter()
        for source in sources:
            counts.update(WORDS.findall(source))
        frequent = counts.most_common(vocabulary - BYTES)
        self._tokens = {word: BYTES + i for i, (word, _) in enumerate(frequent)}

    def encode(self, source: bytes) -> list[int]:
        """Returns the tokens of a text."""
        tokens = []
        for word in WORDS.findall(source):
            token = self._tokens.get(word)
            tokens.extend(word if token is None else (token,))
        return tokens


class Corpus:
    """Training and validation batches.

    Whole files are kept for validation. A batch depends on nothing but the seed and the
    number of the step, so that a run that goes on needs no state of an iterator.

    Args:
      pattern: The files of the standard library to read, a glob pattern.
      vocabulary: The number of tokens.
      context: The number of tokens that the model sees. Sequences are one longer.
      seed: The seed of the batches.

    Attributes:
      training: The tokens of the training files, uint16[n].
      validation: The tokens of the validation files, uint16[n].

    Raises:
      SettingError: If the pattern matches too little text.
    """

    def __init__(self, pattern: str, vocabulary: int, context: int, seed: int):
        sources = _read_library(pattern)
        every = round(1 / VALIDATION_SHARE)
        training = [s for i, s in enumerate(sources) if i % every]
        tokenizer = Tokenizer(training, vocabulary)
        self._seed = seed
        self._length = context + 1
        self.training = _join(tokenizer, training)
        self.validation = _join(tokenizer, sources[::every])
        if min(len(self.training), len(self.validation)) < 2 * self._length:
            raise SettingError("corpus", "match more text, as '*.py' does", pattern)

    @property
    def digest(self) -> str:
        """A hash of all tokens: another version of Python has other sources."""
        both = self.training.tobytes() + self.validation.tobytes()
        return hashlib.sha256(both).hexdigest()[:16]

    def training_batch(self, step: int, size: int) -> np.ndarray:
        """Returns the batch of a step, random windows: int32[size, context + 1]."""
        rng = np.random.default_rng([self._seed, step])
        starts = rng.integers(len(self.training) - self._length, size=size)
        return self._windows(self.training, starts)

    def validation_batches(self, count: int, size: int) -> np.ndarray:
        """Returns evenly spaced windows: int32[count, size, context + 1]."""
        most = len(self.validation) - self._length
        starts = np.linspace(0, most, count * size).astype(np.int64)
        return self._windows(self.validation, starts).reshape(count, size, -1)

    def _windows(self, tokens: np.ndarray, starts: np.ndarray) -> np.ndarray:
        rows = starts[:, None] + np.arange(self._length)
        return tokens[rows].astype(np.int32)


def make_corpus(config: Config) -> Corpus:
    """Returns the batches of a run."""
    return Corpus(config.corpus, config.vocabulary, config.context, config.seed)


def _read_library(pattern: str) -> list[bytes]:
    library = Path(sysconfig.get_path("stdlib"))
    try:
        found = [path for path in library.glob(pattern) if path.is_file()]
        paths = [path.relative_to(library) for path in found]
    except (NotImplementedError, ValueError):
        rule = "be a glob pattern relative to the library, such as '*.py'"
        raise SettingError("corpus", rule, pattern) from None
    kept = [path for path in paths if not NOT_THE_LIBRARY & set(path.parts)]
    return [(library / path).read_bytes() for path in sorted(kept)]


def _join(tokenizer: Tokenizer, sources: list[bytes]) -> np.ndarray:
    tokens = [token for source in sources for token in tokenizer.encode(source)]
    return np.array(tokens, np.uint16)
