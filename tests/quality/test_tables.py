"""From results to tables, files and plots."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from engine.variants import VARIANTS
from quality import Method, Result, summarise
from quality.methods import methods_of
from quality.plot import svg
from quality.report import markdown, terminal
from quality.results import ResultFile, Seconds
from schemas.errors import InputError

DONE = Result(
    key="k",
    set="s",
    question="q0",
    policy="none",
    options={},
    variant="shared_prefix",
    budget=0.0,
    kl=0.1,
    kl_first=0.2,
    f1=0.5,
    right=True,
    answer="x",
    prompt_tokens=100,
    chunk_tokens=80,
    repaired_tokens=0,
    fresh_tokens=20,
    seconds=Seconds(0.1, 0.2, 0.0, 0.7),
)


def result(policy: str, question: str, kl: float, right: bool | None = True, budget: float = 0.0) -> Result:
    bare = policy in ("full", "no_context")
    variant = "" if bare else "shared_prefix"
    key = f"{policy} {question} {budget}"
    return replace(DONE, key=key, policy=policy, question=question, kl=kl, right=right, variant=variant, budget=budget)


def table() -> list[Result]:
    results = []
    for number, (full, nothing, method) in enumerate([(True, False, True), (True, False, False), (False, False, True)]):
        name = f"q{number}"
        results += [result("full", name, 0.0, full), result("no_context", name, 2.0, nothing)]
        results += [result("none", name, 0.4, method)]
        results += [result("closure", name, 0.1 * (number + 1), method, 0.15), result("epic", name, 0.3, True, 0.15)]
    return results


def test_a_row_is_means_medians_and_retention_of_the_same_questions() -> None:
    report = summarise(table(), {"model": "m"})
    (row,) = [row for row in report.rows if row["policy"] == "closure"]
    assert row["kl"] == pytest.approx(0.2)
    assert row["kl_low"] <= 0.2 <= row["kl_high"]
    assert (row["asked"], row["kept"], row["lost"], row["gained"]) == (2, 1, 1, 1)
    assert row["retention"] == 0.5
    assert row["ttft_s"] == pytest.approx(1.0)
    assert row["ttft_ratio"] == pytest.approx(1.0)
    assert (row["load_s"], row["stitch_s"], row["first_step_s"]) == (0.1, 0.2, 0.7)
    assert json.loads(json.dumps(report.as_dict()))["about"] == {"model": "m"}


def test_without_known_answers_there_is_no_f1_and_no_retention() -> None:
    report = summarise([replace(each, f1=None, right=None) for each in table()], {})
    assert all(row["f1"] is None and row["retention"] is None for row in report.rows)
    assert "retention" in terminal(report.rows[0])


def test_the_markdown_table_marks_the_best_of_each_budget() -> None:
    text = markdown(summarise(table(), {}))
    assert "### s, 3 questions" in text
    bold = [line for line in text.splitlines() if "**" in line]
    assert len(bold) == 1
    assert bold[0].startswith("| shared_prefix | closure | 15% | **0.2000** |")
    assert "50% (1/2" in bold[0]
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert len(widths) == 1


def test_a_method_that_few_questions_cannot_tell_from_the_best_is_marked() -> None:
    """closure .1, .2, .3; cacheblend is worse on one question and better on another; random is worse on each."""
    others = []
    for number, (uneven, worse) in enumerate([(0.35, 0.2), (0.15, 0.3), (0.25, 0.4)]):
        others += [result("cacheblend", f"q{number}", uneven, budget=0.15)]
        others += [result("random", f"q{number}", worse, budget=0.15)]
    report = summarise(table() + others, {})
    rows = {row["policy"]: row for row in report.rows if row["budget"]}
    assert rows["cacheblend"]["kl_over_best"] == pytest.approx(0.05)
    assert rows["cacheblend"]["kl_over_best_low"] < 0 < rows["cacheblend"]["kl_over_best_high"]
    assert rows["random"]["kl_over_best_low"] == pytest.approx(0.1)
    text = markdown(report)
    assert "| cacheblend | 15% | 0.2500 ≈ |" in text
    assert "| random | 15% | 0.3000 |" in text
    (unrepaired,) = [row for row in report.rows if row["policy"] == "none"]
    assert unrepaired["kl_over_best"] is None
    of_one = markdown(summarise([each for each in table() + others if each.question == "q0"], {}))
    assert "| random | 15% | 0.2000 ≈ |" in of_one


def test_the_plot_is_a_picture_with_every_method_in_it() -> None:
    picture = svg(summarise(table(), {}), "s")
    root = ET.fromstring(picture)
    assert root.tag.endswith("svg")
    for name in ("shared_prefix: closure", "shared_prefix: none", "no context"):
        assert name in picture
    assert ET.fromstring(svg(summarise([], {}), "s")) is not None


def test_results_are_kept_and_read_again(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "results.jsonl"
    kept = ResultFile(file)
    for each in table():
        kept.add(each)
        kept.add(each)  # the same again is nothing new
    assert len(file.read_text().splitlines()) == len(table())
    again = ResultFile(file)
    assert [again.known(each.key) for each in table()] == table()
    assert again.known("unknown") is None


def test_a_line_that_a_killed_run_left_torn_is_cut_off_and_made_again(tmp_path: Path) -> None:
    """A run that was killed in the middle of a write must go on, and must not glue two lines together."""
    file = tmp_path / "results.jsonl"
    ResultFile(file).add(DONE)
    whole = file.read_bytes()
    file.write_bytes(whole + whole[:50])
    kept = ResultFile(file)
    kept.add(replace(DONE, key="l"))
    assert [json.loads(line)["key"] for line in file.read_text().splitlines()] == ["k", "l"]


def test_a_file_of_something_else_is_not_written_to(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("my notes\nare here\n")
    with pytest.raises(InputError, match=r"notes\.txt, line 1: not a result of `kvquilt eval`"):
        ResultFile(file)
    assert file.read_text() == "my notes\nare here\n"


def test_methods_of_a_command_line() -> None:
    run, asked = methods_of(["closure:floor=32,layers=[12, 14]", "none"], [0.15], ["fused"])
    closure = Method("closure", 0.15, VARIANTS["fused"], (("floor", 32), ("layers", (12, 14))))
    assert run == [Method("none", 0.0, VARIANTS["fused"]), closure]
    assert asked == [closure, Method("none", 0.0, VARIANTS["fused"])]
    assert closure.label == "closure floor=32 layers=(12, 14)"


def test_without_a_policy_all_are_run_at_all_budgets_and_none_once_for_each_variant() -> None:
    run, asked = methods_of([], [], ["shared_prefix", "fused"])
    assert asked == run
    assert len(set(run)) == len(run)
    assert sum(method.policy == "none" for method in run) == 2
    assert sum(method.policy == "closure" for method in run) == 2 * 4
    assert {dict(m.options).get("n_head") for m in run if m.policy == "epic"} == {None, 16, 32}
    assert not any(method.policy == "full" for method in run)  # full attention is a row of every table


def test_full_attention_may_be_asked_for_and_is_not_run_twice() -> None:
    run, asked = methods_of(["full"], [], [])
    assert asked == [Method("full")]
    assert run == [Method("none")]


@pytest.mark.parametrize(
    ("policies", "budgets", "variants", "says"),
    [
        (["closer"], [], [], "there is no selection policy 'closer'"),
        (["closure:floor"], [], [], "options are name=value, such as closure:floor=32"),
        (["closure:floor=[1"], [], [], "is not YAML"),
        (["closure"], [1.01], [], r"the budget is 1\.01"),
        (["closure"], [], ["fuse"], "there is no prefill variant 'fuse'"),
    ],
)
def test_what_does_not_exist_is_refused(policies: list, budgets: list, variants: list, says: str) -> None:
    with pytest.raises(InputError, match=says):
        methods_of(policies, budgets, variants)
