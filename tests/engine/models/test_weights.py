"""Weights from safetensors: read into place whatever the files' cut and type, and sentences for bad ones."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanochat.engine.models import weights as weights_module
from nanochat.engine.models.decoder import Decoder
from nanochat.engine.models.families import load_model_config
from nanochat.engine.models.weights import load_decoder, weight_files
from nanochat.engine.progress import Progress, ignore_progress
from nanochat.errors import ModelNotFound, NotEnoughMemory, UnsupportedModel
from tests.engine.models.paged import PagedSequences
from tests.engine.models.random_models import (
    CASES,
    assert_close,
    random_tokens,
    reference_logits,
    write_random_model,
)
from tests.tiny_model import write_tiny_llama

CPU = torch.device("cpu")
PROMPT = random_tokens(20)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_decoder(folder, load_model_config(folder), CPU, dtype)


def logits(decoder: Decoder) -> torch.Tensor:
    return PagedSequences(decoder).prefill(0, PROMPT)


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Rewrite a folder's only weight file."""
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors")


def test_sharded_files(tmp_path: Path) -> None:
    model = write_random_model(tmp_path, CASES["llama"])
    (tmp_path / "model.safetensors").unlink()
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(weight_files(tmp_path)) > 3
    assert_close(logits(load(tmp_path)), reference_logits(model, PROMPT))


def test_files_are_mapped_anew_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_random_model(tmp_path, CASES["llama"])
    monkeypatch.setattr("nanochat.engine.models.weights._MAPPED_BYTES", 10_000)
    assert_close(logits(load(tmp_path)), reference_logits(model, PROMPT))


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64])
def test_types_are_converted(stored: torch.dtype, tmp_path: Path) -> None:
    model = write_random_model(tmp_path, CASES["llama"])
    change(tmp_path, lambda weights: weights.update({name: w.to(stored) for name, w in weights.items()}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(stored))
    assert_close(logits(load(tmp_path)), reference_logits(model, PROMPT))


def test_experts_in_one_tensor(tmp_path: Path) -> None:
    """Some files hold all experts of a layer together."""
    model = write_random_model(tmp_path, CASES["qwen3-moe"])
    kept = {n: w for n, w in load_file(tmp_path / "model.safetensors").items() if ".experts." not in n}
    stacked = {n: p.detach() for n, p in model.named_parameters() if ".experts." in n}
    save_file(kept | stacked, tmp_path / "model.safetensors")
    assert_close(logits(load(tmp_path)), reference_logits(model, PROMPT))


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_half_of_a_model_that_sees(prefix: str, tmp_path: Path) -> None:
    model = write_random_model(tmp_path, CASES["gemma3"])
    weights = load_file(tmp_path / "model.safetensors")
    nested = {prefix + name.removeprefix("model."): weight for name, weight in weights.items()}
    nested["vision_tower.patch.weight"] = torch.zeros(3)
    save_file(nested, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_close(logits(load(tmp_path)), reference_logits(model, PROMPT))


def test_an_output_matrix_of_its_own_is_believed_over_the_config(tmp_path: Path) -> None:
    model = write_random_model(tmp_path, CASES["llama-tied"])
    head = torch.randn(model.config.vocab_size, model.config.hidden_size)
    change(tmp_path, lambda weights: weights.update({"lm_head.weight": head}))
    decoder = load(tmp_path)
    assert not decoder.config.tie_word_embeddings
    assert torch.equal(decoder.lm_head.weight, head)


def test_a_copy_of_tied_embeddings_is_ignored(tmp_path: Path) -> None:
    write_random_model(tmp_path, CASES["llama-tied"])
    change(tmp_path, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    decoder = load(tmp_path)
    assert decoder.lm_head.weight is decoder.embedding


def test_progress_reaches_its_total(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    seen: list[Progress] = []
    load_decoder(tmp_path, load_model_config(tmp_path), CPU, torch.float32, seen.append)
    done = [step.done for step in seen]
    assert done[0] == 0
    assert done == sorted(done)
    assert (
        done[-1]
        == seen[-1].total
        == sum(w.nbytes for w in load_file(tmp_path / "model.safetensors").values())
    )


def test_consolidated_copies_are_left_alone(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    (tmp_path / "consolidated.safetensors").write_bytes(b"")
    assert weight_files(tmp_path) == [tmp_path / "weights.safetensors"]


class TestUnusable:
    """Fault 31: damaged, incomplete or dangerous weights end in a sentence, and no code is run."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return write_tiny_llama(tmp_path)

    def test_only_a_pickle(self, folder: Path) -> None:
        class Bomb:
            def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
                return (Path.touch, (folder / "was-run",))

        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
        with pytest.raises(ModelNotFound, match=r"only as a pickle \(pytorch_model\.bin\)"):
            load(folder)
        assert not (folder / "was-run").exists()

    def test_a_pickle_by_another_name(self, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(pickle.dumps({"weights": [1.0]}))
        with pytest.raises(ModelNotFound, match="damaged or only partly downloaded"):
            load(folder)

    @pytest.mark.parametrize("keep", [0.0, 0.001, 0.5, 0.9999])
    def test_truncated(self, keep: float, folder: Path) -> None:
        content = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(content[: int(len(content) * keep)])
        with pytest.raises(ModelNotFound, match="damaged or only partly downloaded"):
            load(folder)

    def test_a_header_larger_than_the_file(self, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}")
        with pytest.raises(ModelNotFound, match="damaged"):
            load(folder)

    def test_no_weights(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        with pytest.raises(ModelNotFound, match=r"holds no \.safetensors files"):
            load(folder)

    def test_half_downloaded(self, folder: Path) -> None:
        listed = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-3.safetensors"}
        index = {"weight_map": listed}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (folder / "model.safetensors").rename(folder / "model-1.safetensors")
        with pytest.raises(ModelNotFound, match=r"model-2\.safetensors is missing, and 1 more"):
            load(folder)

    @pytest.mark.parametrize(
        "weight_map", [None, {}, [], {"a": "../other.safetensors"}, {"a": "model.bin"}, {"a": 3}]
    )
    def test_an_index_that_leads_elsewhere(self, weight_map: object, folder: Path) -> None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ModelNotFound, match="doesn't list weight files"):
            load(folder)

    def test_a_tensor_missing(self, folder: Path) -> None:
        change(folder, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))  # type: ignore[arg-type, return-value]
        with pytest.raises(ModelNotFound, match=r"no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
            load(folder)

    def test_a_tensor_of_another_shape(self, folder: Path) -> None:
        change(folder, lambda weights: weights.update({"model.norm.weight": torch.ones(63)}))
        with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight is \[63\], not \[64\]"):
            load(folder)

    def test_a_tensor_without_use(self, folder: Path) -> None:
        name = "model.layers.0.self_attn.q_proj.bias"
        change(folder, lambda weights: weights.update({name: torch.ones(64)}))
        with pytest.raises(
            UnsupportedModel, match=r"has no use for, such as 'model\.layers\.0\.self_attn\.q_proj\.bias"
        ):
            load(folder)

    def test_integer_weights(self, folder: Path) -> None:
        change(folder, lambda weights: weights.update({n: w.to(torch.int8) for n, w in weights.items()}))
        with pytest.raises(UnsupportedModel, match="I8 weights, quantised"):
            load(folder)

    def test_sizes_far_beyond_the_files_are_refused_before_allocating(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config |= {
            "hidden_size": 2**18,
            "intermediate_size": 2**20,
            "num_hidden_layers": 4096,
            "head_dim": 4096,
        }
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(UnsupportedModel, match="doesn't match its config"):
            load(folder)

    def test_more_than_the_machine_has_is_refused_before_allocating(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It would be granted on credit, and the process ended while it reads the weights."""
        monkeypatch.setattr(weights_module, "free_cpu_bytes", lambda: 100_000)
        with pytest.raises(NotEnoughMemory, match=r"need \d+\.\d GiB, which cpu doesn't have free"):
            load_decoder(folder, load_model_config(folder), CPU, torch.float32, ignore_progress)

    def test_too_little_memory(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def exhausted(*arguments: object, **options: object) -> torch.Tensor:
            if str(options.get("device")) == "meta":
                return empty(*arguments, **options)  # type: ignore[arg-type]
            raise torch.OutOfMemoryError("out of memory")

        empty = torch.empty
        monkeypatch.setattr(torch, "empty", exhausted)
        with pytest.raises(NotEnoughMemory, match=r"need \d+\.\d GiB, which cpu doesn't have free"):
            load_decoder(folder, load_model_config(folder), CPU, torch.float32, ignore_progress)
