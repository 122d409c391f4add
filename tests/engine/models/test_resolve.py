"""What a user may name as a model: folders, GGUF files and nothing at all (Hub ids: test_hub.py)."""

from __future__ import annotations

import os
from pathlib import Path

import huggingface_hub.constants
import pytest

from nanochat.engine.models import resolve
from nanochat.engine.models.cache import CACHE_DIR_VARIABLE
from nanochat.engine.models.families import load_model_config
from nanochat.engine.models.resolve import DEFAULT_HUB_MODEL, resolve_model
from nanochat.engine.progress import ProgressCallback
from nanochat.errors import ModelNotFound
from tests.engine.models.gguf_files import VOCAB_SIZE, write_gguf
from tests.engine.models.hub_server import COMMIT
from tests.engine.models.random_models import CASES, random_model
from tests.tiny_model import write_tiny_llama


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(folder))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    return folder


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "Tiny-Instruct.Q4_K_M.gguf"
    write_gguf(random_model(CASES["llama"], vocab_size=VOCAB_SIZE), path)
    return path


class TestFolders:
    def test_a_folder(self, tmp_path: Path) -> None:
        folder = write_tiny_llama(tmp_path / "tiny-llama")
        model = resolve_model(str(folder))
        assert (model.path, model.name) == (folder, "tiny-llama")

    def test_a_relative_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = write_tiny_llama(tmp_path / "tiny-llama")
        monkeypatch.chdir(folder)
        model = resolve_model(".")
        assert (model.path, model.name) == (folder, "tiny-llama")

    def test_the_home_folder_is_understood(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_tiny_llama(tmp_path / "tiny-llama")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert resolve_model("~/tiny-llama").name == "tiny-llama"


class TestGguf:
    def test_is_converted_once(self, gguf: Path, cache: Path) -> None:
        model = resolve_model(str(gguf))
        assert model.name == "Tiny-Instruct"
        assert model.path.parent == cache
        assert load_model_config(model.path).num_layers == 4
        before = (model.path / "model.safetensors").stat().st_mtime_ns
        assert resolve_model(str(gguf)) == model
        assert (model.path / "model.safetensors").stat().st_mtime_ns == before

    def test_a_changed_file_is_converted_again(self, gguf: Path) -> None:
        first = resolve_model(str(gguf)).path
        os.utime(gguf, ns=(1, 1))
        assert resolve_model(str(gguf)).path != first

    @pytest.mark.parametrize(
        ("stem", "name"),
        [
            ("SmolLM2-135M-Instruct.Q4_1", "SmolLM2-135M-Instruct"),
            ("Qwen3-0.6B-Q8_0", "Qwen3-0.6B"),
            ("gemma-3-1b-it-BF16", "gemma-3-1b-it"),
            ("llama-IQ4_XS", "llama"),
            ("model-f16", "model"),
            ("mistral", "mistral"),
        ],
    )
    def test_the_number_format_is_no_part_of_the_name(self, stem: str, name: str) -> None:
        assert resolve._QUANTISATION.sub("", stem) == name

    def test_a_long_name(self, gguf: Path) -> None:
        """As long as a file system allows, so that nothing can be added to it."""
        longest = gguf.with_name("x" * 250 + ".gguf")
        gguf.rename(longest)
        assert load_model_config(resolve_model(str(longest)).path).num_layers == 4

    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(
            ModelNotFound, match=r"none\.gguf can't be read: No such file or directory; check the path"
        ):
            resolve_model(str(tmp_path / "none.gguf"))


class TestDefault:
    @staticmethod
    def small_default(folder: Path, progress: ProgressCallback) -> None:
        write_tiny_llama(folder)

    def test_the_hub_model_if_it_is_here(self, tmp_path: Path) -> None:
        snapshot = tmp_path / "hub" / f"models--{DEFAULT_HUB_MODEL.replace('/', '--')}" / "snapshots" / COMMIT
        write_tiny_llama(snapshot)
        refs = snapshot.parent.parent / "refs"
        refs.mkdir()
        (refs / "main").write_text(COMMIT)
        model = resolve_model("")
        assert (model.path, model.name) == (snapshot, "Qwen3-0.6B")

    def test_else_the_one_that_needs_no_hub(self, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        monkeypatch.setattr(resolve, "build_default_model", self.small_default)
        model = resolve_model("")
        assert model.name == "SmolLM2-135M-Instruct"
        assert model.path.parent == cache

    @pytest.mark.parametrize("missing", ["model.safetensors", "tokenizer.json", "config.json"])
    def test_half_a_hub_model_does_not_count(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
    ) -> None:
        snapshot = tmp_path / "hub" / f"models--{DEFAULT_HUB_MODEL.replace('/', '--')}" / "snapshots" / COMMIT
        write_tiny_llama(snapshot)
        (snapshot / missing).unlink()
        refs = snapshot.parent.parent / "refs"
        refs.mkdir()
        (refs / "main").write_text(COMMIT)
        monkeypatch.setattr(resolve, "build_default_model", self.small_default)
        assert resolve_model("").name == "SmolLM2-135M-Instruct"


class TestRefusals:
    """Fault 31: each ends in a sentence that says what to do."""

    def test_no_such_path(self, tmp_path: Path) -> None:
        with pytest.raises(ModelNotFound, match=r"There is no .*/nowhere\. Name a folder"):
            resolve_model(str(tmp_path / "nowhere"))

    def test_a_file_of_another_kind(self, tmp_path: Path) -> None:
        (tmp_path / "model.pt").write_bytes(b"")
        with pytest.raises(ModelNotFound, match=r"neither a folder nor a \.gguf file"):
            resolve_model(str(tmp_path / "model.pt"))

    @pytest.mark.parametrize("spec", ["~nobody-of-that-name/model", "~nobody-of-that-name/model.gguf"])
    def test_the_home_of_nobody(self, spec: str) -> None:
        with pytest.raises(ModelNotFound, match=r"There is no ~nobody|No such file"):
            resolve_model(spec)

    @pytest.mark.parametrize("spec", ["x" * 300, "x" * 300 + ".gguf", "folder/" + "x" * 5000])
    def test_a_name_too_long_for_a_file(self, spec: str) -> None:
        with pytest.raises(ModelNotFound, match="File name too long"):
            resolve_model(spec)

    @pytest.mark.parametrize("spec", ["/nowhere/" + "x" * 200, "/" + "y/" * 3000])
    def test_a_long_name_is_cut_in_the_message(self, spec: str) -> None:
        with pytest.raises(ModelNotFound) as caught:
            resolve_model(spec)
        assert spec[:20] + "…" + spec[-59:] in str(caught.value)

    def test_a_folder_that_may_not_be_entered(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(path: Path) -> bool:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "is_dir", refuse)
        with pytest.raises(ModelNotFound, match="can't be read: Permission denied"):
            resolve_model(str(tmp_path / "model"))

    def test_an_empty_folder(self, tmp_path: Path) -> None:
        with pytest.raises(ModelNotFound, match=r"holds no config\.json"):
            resolve_model(str(tmp_path))

    def test_a_folder_without_weights(self, tmp_path: Path) -> None:
        (write_tiny_llama(tmp_path) / "model.safetensors").unlink()
        with pytest.raises(ModelNotFound, match=r"holds no \.safetensors"):
            resolve_model(str(tmp_path))

    def test_a_folder_without_tokenizer(self, tmp_path: Path) -> None:
        (write_tiny_llama(tmp_path) / "tokenizer.json").unlink()
        with pytest.raises(ModelNotFound, match="has no tokenizer"):
            resolve_model(str(tmp_path))
