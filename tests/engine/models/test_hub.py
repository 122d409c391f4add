"""Models by Hub id against a stand-in server: what is fetched, resumed, kept for offline, and refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
from safetensors.torch import load_file

from nanochat.engine.models.hub import cached_model
from nanochat.engine.models.resolve import resolve_model
from nanochat.engine.progress import Progress
from nanochat.engine.tokenizer import TOKENIZER_FILES
from nanochat.errors import ModelNotFound
from tests.engine.models.hub_server import HubServer, serving
from tests.tiny_model import write_tiny_llama

REPO = "someone/tiny-llama"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A repository with all that real ones hold."""
    folder = write_tiny_llama(tmp_path / "source")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "modeling_tiny.py").write_text("raise SystemExit('remote code was run')")
    (folder / "consolidated.safetensors").write_bytes(b"the weights once more")
    (folder / "README.md").write_text("# Tiny")
    return folder


@pytest.fixture
def hub(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The client, which reads its settings once when imported, turned to the stand-in and an empty cache."""
    constants = huggingface_hub.constants
    with serving(REPO, source) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield server


def test_settings_tokenizer_and_weights_come_and_nothing_else(hub: HubServer, source: Path) -> None:
    model = resolve_model(REPO)
    assert model.name == "tiny-llama"
    assert {path.name for path in model.path.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert (model.path / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


@pytest.mark.parametrize("names", TOKENIZER_FILES[1:])
def test_all_that_an_older_tokenizer_is_made_of_comes_too(
    hub: HubServer, source: Path, names: tuple[str, ...]
) -> None:
    (source / "tokenizer.json").unlink()
    for name in names:
        (source / name).write_text("{}")
    model = resolve_model(REPO)
    assert all((model.path / name).is_file() for name in names)


def test_progress_counts_bytes_up_to_the_total(hub: HubServer, source: Path) -> None:
    seen: list[Progress] = []
    resolve_model(REPO, seen.append)
    bytes_seen = [step for step in seen if step.unit == "B"]
    assert {step.stage for step in bytes_seen} == {f"Downloading {REPO}"}
    assert bytes_seen[-1].done == bytes_seen[-1].total
    assert bytes_seen[-1].total == sum(
        path.stat().st_size
        for path in source.iterdir()
        if path.suffix in (".json", ".safetensors") and path.name != "consolidated.safetensors"
    )


def test_a_second_start_asks_no_network(hub: HubServer) -> None:
    first = resolve_model(REPO)
    hub.requests.clear()
    assert resolve_model(REPO) == first
    assert hub.requests == []


def test_a_cut_download_goes_on_where_it_stopped(
    hub: HubServer, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    hub.cut_after = 20_000
    try:
        model = resolve_model(REPO)  # the client may resume by itself, or leave it to the next start
    except ModelNotFound as error:
        assert "what has come is kept" in str(error)  # noqa: PT017 - either way is right
        assert cached_model(REPO) is None
        model = resolve_model(REPO)
    assert hub.downloads("model.safetensors") == ["", "bytes=20000-"]
    assert (
        load_file(model.path / "model.safetensors").keys() == load_file(source / "model.safetensors").keys()
    )


@pytest.mark.parametrize("missing", ["model.safetensors", "tokenizer.json", "config.json"])
def test_half_a_cache_is_completed(hub: HubServer, missing: str) -> None:
    """Other programs keep only what they need of a model in the same cache."""
    folder = resolve_model(REPO).path
    (folder / missing).unlink()
    assert cached_model(REPO) is None
    assert resolve_model(REPO).path == folder
    assert (folder / missing).is_file()


def test_the_token_of_the_environment_is_used(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.needs_token = "hf_secret"
    assert resolve_model(REPO).name == "tiny-llama"


class TestRefusals:
    """Each ends in a sentence that says what to do."""

    def test_wrong_id(self, hub: HubServer) -> None:
        with pytest.raises(ModelNotFound, match=r"no model 'someone/else'.*Check the spelling"):
            resolve_model("someone/else")

    def test_no_permission(self, hub: HubServer) -> None:
        hub.needs_token = "hf_secret"
        with pytest.raises(ModelNotFound, match="set HF_TOKEN"):
            resolve_model(REPO)

    def test_terms_not_accepted(self, hub: HubServer) -> None:
        hub.status, hub.error_code = 403, "GatedRepo"
        with pytest.raises(ModelNotFound, match=r"accepted its terms.*set HF_TOKEN"):
            resolve_model(REPO)

    def test_forbidden(self, hub: HubServer) -> None:
        hub.status = 403
        with pytest.raises(ModelNotFound, match="token that may read it"):
            resolve_model(REPO)

    def test_failing_hub(self, hub: HubServer) -> None:
        hub.status = 500
        with pytest.raises(ModelNotFound, match=r"status 500.*Try again"):
            resolve_model(REPO)

    def test_no_network(self, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
        with pytest.raises(ModelNotFound, match="Check the name first, then the network"):
            resolve_model(REPO)

    def test_only_pickles(self, hub: HubServer, source: Path) -> None:
        (source / "model.safetensors").unlink()
        (source / "consolidated.safetensors").unlink()
        with pytest.raises(ModelNotFound, match=r"has no \.safetensors weights"):
            resolve_model(REPO)
        assert hub.downloads("pytorch_model.bin") == []

    @pytest.mark.parametrize(
        "spec", ["a/b/c", "../x", "white space", "x/..", "https://huggingface.co/a/b", "-x"]
    )
    def test_no_hub_id(self, spec: str, hub: HubServer) -> None:
        with pytest.raises(ModelNotFound, match="Name a folder"):
            resolve_model(spec)
        assert hub.requests == []

    @pytest.mark.parametrize("spec", ["some--one/model", "someone/model-", "a/" + "b" * 200])
    def test_an_id_the_hub_would_not_have(self, spec: str, hub: HubServer) -> None:
        with pytest.raises(ModelNotFound, match="neither as a folder here nor on the Hub"):
            resolve_model(spec)


@pytest.mark.slow
def test_a_fresh_process_offline(source: Path, tmp_path: Path) -> None:
    """As a user has it: the environment names the Hub; then the network is gone."""
    script = "import sys; from nanochat.engine.models.resolve import resolve_model; print(resolve_model(sys.argv[1]).path)"

    def run(endpoint: str) -> str:
        environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home")}
        environment.pop("HF_HUB_OFFLINE", None)
        command = [sys.executable, "-c", script, REPO]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    with serving(REPO, source) as server:
        online = run(server.url)
    assert run("http://127.0.0.1:9") == online
