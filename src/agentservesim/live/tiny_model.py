"""A Llama with random weights and a tokenizer of its own, so that a real engine runs without a download.

    python -m agentservesim.live.tiny_model FOLDER [--hidden-size 256 …]

Run it with the Python that has vLLM: torch, transformers and tokenizers come with it.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from agentservesim.errors import InputError

FIRST_WORD = 4
"""Token ids below it are special; those from it on are words, the i-th named w<i>."""
MARK = "tiny_model.json"
"""In the folder, once the model is complete: the sizes it was made with."""


@dataclass(frozen=True)
class Sizes:
    """The model, in the words of its config.json; equal sizes give equal weights.

    The defaults are those of `live validate`: a step of a few milliseconds on one core of a CPU.
    """

    hidden_size: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    intermediate_size: int = 768
    vocab_size: int = 2048
    max_position_embeddings: int = 32768
    seed: int = 0

    def check(self) -> None:
        """Raises InputError where no model can have these sizes."""
        for name, value in asdict(self).items():
            if value < (0 if name == "seed" else 1):
                raise InputError(f"--{name.replace('_', '-')} is {value}: expected at least 1")
        for name, whole, parts in (
            ("--hidden-size", self.hidden_size, 2 * self.heads),
            ("--heads", self.heads, self.kv_heads),
        ):
            if whole % parts:
                raise InputError(f"{name} is {whole}: expected a multiple of {parts}")
        if self.vocab_size <= FIRST_WORD:
            raise InputError(f"--vocab-size is {self.vocab_size}: expected more than {FIRST_WORD}")


def make_model(folder: Path, sizes: Sizes | None = None) -> bool:
    """Make the model in `folder`; False where it is already there with these sizes.

    Raises InputError for sizes that do not go together, a folder that holds something else, or a Python
    without torch and transformers.
    """
    sizes = sizes or Sizes()
    sizes.check()
    if is_made(folder, sizes):
        return False
    mark = folder / MARK
    if folder.exists() and any(folder.iterdir()) and not mark.exists():
        raise InputError(f"{folder}: holds something else than a tiny model; expected a new or empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    mark.write_text("{}\n", encoding="utf-8")  # not complete yet, but ours to overwrite
    _save(folder, sizes)
    mark.write_text(json.dumps(asdict(sizes)) + "\n", encoding="utf-8")
    return True


def is_made(folder: Path, sizes: Sizes) -> bool:
    """Whether `folder` holds this model, whole."""
    try:
        return bool(json.loads((folder / MARK).read_text(encoding="utf-8")) == asdict(sizes))
    except (OSError, ValueError):
        return False


def _save(folder: Path, sizes: Sizes) -> None:
    try:
        import tokenizers
        import torch
        import transformers
    except ImportError as error:
        raise InputError(
            f"{error}; expected the Python that has vLLM (scripts/install_vllm.sh makes one)"
        ) from None
    torch.manual_seed(sizes.seed)
    config = transformers.LlamaConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=sizes.max_position_embeddings,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        dtype=torch.bfloat16,
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    words |= {f"w{token}": token for token in range(FIRST_WORD, sizes.vocab_size)}
    tokenizer: Any = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)


def main(arguments: list[str] | None = None) -> None:
    """The command line of this module."""
    parser = argparse.ArgumentParser(
        prog="python -m agentservesim.live.tiny_model", description="Make a tiny random Llama for vLLM."
    )
    parser.add_argument("folder", type=Path)
    for field in fields(Sizes):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    given = vars(parser.parse_args(arguments))
    folder = given.pop("folder")
    try:
        made = make_model(folder, Sizes(**given))
    except InputError as error:
        parser.exit(error.exit_code, f"error: {error}\n")
    print(f"{folder}: {'made' if made else 'is there already'}")


if __name__ == "__main__":
    main()
