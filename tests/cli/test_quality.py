"""`kvquilt eval` and `kvquilt verify` as a person meets them; a tiny model stands for a large one."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers

import kvquilt as program
from engine.certified import coverage
from quality import Subject
from quality.row_cache import RowCache
from schemas.certificate import Certificate, first_valid
from schemas.errors import InputError, KvquiltError
from schemas.fingerprint import Generation
from stores import CertificateStore, open_blobs
from tests.cli.test_commands import kvquilt
from tests.engine.conftest import SHAPE, template_of, tiny_model
from tests.quality.conftest import embed

SET = [{"question": f"Who {n}?", "answers": ["Ada"], "chunks": [f"Ada saw {n}.", "Bruno slept."]} for n in range(3)]


def call(*arguments: str) -> None:
    program.app([*arguments, "-q"], standalone_mode=False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("eval", "musque"), "there is no question set 'musque'"),
        (("eval", "musique"), "say where its file is with --data FOLDER"),
        (("eval", "musique", "--data", "absent"), "no file musique*.jsonl in this folder"),
        (("eval", "ruler", "--policy", "closer"), "there is no selection policy 'closer'; known are none, "),
        (("eval", "ruler", "--variant", "fuse"), "there is no prefill variant 'fuse'; known are alone, "),
        (("eval", "ruler", "--policy", "closure", "--budget", "1.5"), "the budget is 1.5; expected the share"),
        (("eval", "ruler", "--order", "up"), "there is no order 'up' of chunks"),
        (("eval", "absent.jsonl"), "absent.jsonl: no such file"),
        (("verify", "--policy", "closer"), "there is no selection policy 'closer'"),
        (("eval", "ruler", "--variant", "fused:farthest"), "neighbours cannot be chosen by 'farthest'; known are"),
        (("verify", "--variant", "fused:random"), "a certificate is about rows that are served"),
        (("verify", "--policy", "closure:floor=.nan"), "the value of floor cannot be written as JSON"),
        (("verify", "--policy", "composite"), "policy composite wants prompts of a layout of its own"),
        (("verify", "./absent"), "./absent: no such folder or .gguf file"),
    ],
)
def test_what_is_wrong_is_said_before_a_model_is_loaded(arguments, said, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVQUILT_DATA_DIR", str(tmp_path / "data"))
    with pytest.raises(KvquiltError) as caught:
        call(*arguments)
    assert said in str(caught.value)


@pytest.mark.slow
def test_it_is_one_sentence_and_exit_status_1() -> None:
    result = kvquilt("eval", "musque")
    assert result.returncode == 1
    assert result.stderr.startswith("kvquilt: there is no question set 'musque'")
    assert result.stderr.count("\n") == 1


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Subject:
    """The commands find a tiny model instead of loading one."""
    model = tiny_model(transformers.LlamaConfig(**{**SHAPE, "max_position_embeddings": 16_384}))
    template = template_of(model)
    cache = RowCache(tmp_path / "cache", 1 << 28, model.fingerprint)
    subject = Subject(model, template, lambda: (embed, "0" * 64), cache, tuple(range(30, 60)), 2)
    generation = Generation(
        fingerprint=model.fingerprint,
        prefix_sha256=template.prefix_sha256,
        front_sha256=template.prefix_sha256,
        neighbours=0,
        prefill_variant="shared_prefix",
        embedder="words",
        embedder_sha256="0" * 64,
        embedding_dim=64,
        chunker="c/1",
        chunk_max_tokens=512,
    )
    identity = SimpleNamespace(generation=generation)  # all that the command looks at
    for command in ("evaluate", "verify"):
        monkeypatch.setattr(f"cli.{command}.load_subject", lambda settings: subject)
    monkeypatch.setattr("cli.verify.resolve_generation", lambda settings: identity)
    return subject


def test_eng_08_eval_prints_one_line_of_json_for_each_row_that_was_asked_for(
    tiny: Subject, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "three.jsonl"
    file.write_text("\n".join(map(json.dumps, SET)))
    options = ["--variant", "fused", "--policy", "closure", "--budget", "0.15", "--limit", "2", "--json"]
    table, plot, results = tmp_path / "table.md", tmp_path / "plot.svg", tmp_path / "results.jsonl"
    files = ["--markdown", str(table), "--plot", str(plot), "--results", str(results)]
    call("eval", str(file), *options, *files)
    (line,) = capsys.readouterr().out.splitlines()
    row = json.loads(line)
    assert {"kl", "kl_first", "retention", "f1", "ttft_s"} <= set(row)
    assert (row["set"], row["variant"], row["policy"], row["budget"], row["questions"]) == (
        "three",
        "fused",
        "closure",
        0.15,
        2,
    )
    assert set(row["baselines"]) == {"full", "no_context", "none"}
    assert row["baselines"]["none"]["variant"] == "fused"
    assert "| fused | closure | 15% |" in table.read_text()
    assert plot.read_text().startswith("<svg")
    assert len(results.read_text().splitlines()) == 2 * 4
    call("eval", str(file), *options, *files)
    assert json.loads(capsys.readouterr().out)["kl"] == row["kl"]
    assert len(results.read_text().splitlines()) == 2 * 4


def test_eval_names_the_bad_line_of_a_set(tiny: Subject, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(json.dumps(SET[0]) + "\n" + json.dumps({**SET[1], "chunks": "x y"[:0]}) + "\n")
    with pytest.raises(InputError, match=r"bad\.jsonl, line 2: `chunks`"):
        call("eval", str(file))


def test_verify_makes_stores_and_writes_a_certificate_and_says_what_blend_takes(
    tiny: Subject, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, data = tmp_path / "out" / "certificate.json", tmp_path / "data"
    options = ["--limit", "2", "--policy", "closure", "--budget", "0.5", "--set", "quality.max_kl=100"]
    call("verify", *options, "--file", str(file), "--data-dir", str(data), "--format", "json")
    told = json.loads(capsys.readouterr().out)
    assert told["conformant"] is True
    assert (told["chosen"]["policy"], told["chosen"]["budget"]) == ("none", 0.0)
    written = Certificate.from_bytes(file.read_bytes())
    assert [(row.policy, row.budget) for row in written.rows] == [("none", 0.0), ("closure", 0.5)]
    assert written.questions == 2
    store = CertificateStore(open_blobs((data / "blobs").as_uri()), told["generation"])
    covers = coverage(tiny.model.fingerprint, tiny.template, tiny.company)
    assert first_valid(store.all(), covers) == (written, "")


def test_verify_of_a_model_that_fails_ends_with_its_name_and_a_certificate_that_says_so(
    tiny: Subject, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.model.reuse_refusal = "its keys are rotated in a way that we do not know"
    file = tmp_path / "certificate.json"
    with pytest.raises(InputError, match="tiny failed rope; it is served in exact mode only"):
        call("verify", "--file", str(file), "--no-store")
    written = Certificate.from_bytes(file.read_bytes())
    assert not written.conformant
    assert written.rows == ()
