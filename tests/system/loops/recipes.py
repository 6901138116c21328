"""Runs a recipe of docs/guide/fine-tuning.md on small models: ``python -m tests.system.loops.recipes RECIPE SERVER``.

What the page calls ``model``, ``base``, ``dataset``, ``tokenizer``, ``make_model`` and ``make_dataset`` is made here.
Results are in the present folder, as those of the page.
"""

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[3]
STEPS = 6


def recipe(name: str) -> str:
    """The code of a recipe."""
    page = (ROOT / "docs" / "guide" / "fine-tuning.md").read_text()
    [code] = re.findall(rf"<!-- recipe: {name} -->\n```python\n(.*?)```", page, re.DOTALL)
    return code


def language_model() -> Any:
    """A GPT-2 over a few words."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    small = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**small, bos_token_id=0, eos_token_id=0, pad_token_id=0))


def tokens() -> list[dict[str, torch.Tensor]]:
    """Rows of words, by their numbers."""
    rows = torch.randint(0, 32, (64, 16), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in rows]


def words() -> dict[str, Any]:
    """A tokenizer, and texts for it."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = {"<end>": 0} | {f"w{i}": i for i in range(1, 32)}
    plain = Tokenizer(models.WordLevel(known, unk_token="<end>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<end>", pad_token="<end>", unk_token="<end>")
    texts = [" ".join(f"w{number}" for number in row["input_ids"].clamp(min=1).tolist()[:12]) for row in tokens()]
    return {"tokenizer": tokenizer, "dataset": Dataset.from_dict({"text": texts})}


def make_model() -> torch.nn.Module:
    """A small classifier."""
    torch.manual_seed(0)
    return torch.nn.Linear(8, 3)


def make_dataset() -> torch.utils.data.Dataset:
    """Samples for it."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, 8, generator=generator), torch.randint(0, 3, (64,), generator=generator)
    return torch.utils.data.TensorDataset(x, y)


def given(name: str) -> dict[str, Any]:
    """What a recipe finds."""
    match name:
        case "trainer":
            return {"model": language_model(), "dataset": tokens()}
        case "adapters":
            return {"base": language_model()}
        case "trl":
            return {"model": language_model()} | words()
        case "ray":
            return {"make_model": make_model, "make_dataset": make_dataset}
    raise ValueError(name)


def beside_a_cpu_build() -> None:
    """Let torchvision be imported beside a CPU build of torch, as the loops do."""
    sys.path.append(str(ROOT / "examples" / "loops"))
    importlib.import_module("common")


def run(name: str, server: str) -> dict[str, Any]:
    """Run a recipe; return its names."""
    beside_a_cpu_build()
    code = recipe(name).replace("host:50051", server).replace("max_steps=1000", f"max_steps={STEPS}, use_cpu=True")
    names = given(name)
    exec(compile(code, f"docs/guide/fine-tuning.md: {name}", "exec"), names)
    return names


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2])
