"""Times for other tools, and the comment on a pull request, against a server that answers as GitHub's does."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import pytest

from dtbench.comparison.runs import compare
from dtbench.gate.benchmark import Benchmark
from dtbench.gate.comment import MAX_CHARS, PullRequest
from dtbench.gate.schedule import effect_and_times
from dtbench.gate.verdict import judged
from dtbench.records import exports
from dtbench.records.exports import MAX_NAME_CHARS, Point, points_of, write_exports
from dtbench.records.judged import Verdict
from dtbench.records.run import RunWriter
from dtbench.suite.errors import OutputError, UsageError
from dtbench.tests import made_up
from dtbench.tests.made_up_arm import concluded

HOSTILE = 'a"b\\c\n# TYPE x\r}\x1b[31m\ud800{z="1"} 5'
POINTS = [
    Point(("s", HOSTILE, "core", (("n", 1),)), 2e-6, 1e-6, 3e-6, "REGRESSION", HOSTILE),
    Point(("s", "plain", "torch", ()), 4e-6),
]
# https://prometheus.io/docs/instrumenting/exposition_formats: a sample whose label values escape \, " and line ends.
SAMPLE = re.compile(r'[a-z_]+\{([a-z]+="(?:[^"\\\n]|\\[\\"n])*"(?:,|(?=\})))+\} [0-9.e+-]+')


def test_bmf_is_what_bencher_reads():
    made = json.loads(exports.bmf(POINTS))
    assert list(made.values()) == [
        {"latency": {"value": 2000, "lower_value": 1000, "upper_value": pytest.approx(3000)}},
        {"latency": {"value": 4000}},
    ]
    assert list(made)[1] == "s plain [torch]"
    assert all(name.isprintable() for name in made)


def test_long_names_stay_apart():
    names = {Point(("s", "x" * 3000 + end, "core", ()), 1.0).label for end in "ab"}
    assert len(names) == 2
    assert all(len(name) <= MAX_NAME_CHARS for name in names)


def test_github_is_what_the_action_reads():
    first, second = json.loads(exports.github(POINTS))
    assert first["range"] == "1 to 3"
    assert first["extra"].startswith("REGRESSION: a")
    assert "\n" not in first["name"] + first["extra"]
    assert second == {"name": "s plain [torch]", "unit": "us", "value": pytest.approx(4)}


def test_prometheus_holds_one_sample_a_line():
    lines = exports.prometheus(POINTS).splitlines()
    samples = [line for line in lines if not line.startswith("# ")]
    assert len(samples) == 5  # two times, two bounds, a verdict
    assert all(SAMPLE.fullmatch(line) for line in samples), samples
    assert sum(line.startswith("# TYPE ") for line in lines) == 4


def test_points_are_medians_over_launches_with_their_range():
    runs = [
        made_up.run(
            [
                made_up.result("dispatch", "add", "core", {}, [t], launch=i)
                for i, t in enumerate((3e-6, 1e-6, 2e-6))
            ]
        ),
        made_up.run([made_up.NOT_OK[0]]),
    ]
    assert [(p.time_s, p.low_s, p.high_s) for p in points_of(runs)] == [(2e-6, 1e-6, 3e-6)]
    alone = made_up.run([made_up.result("dispatch", "add", "core", {}, [1e-6, 2e-6, 3e-6, 4e-6, 5e-6])])
    assert [(p.time_s, p.low_s, p.high_s) for p in points_of([alone])] == [(1e-6, 1e-6, 4e-6)]


def test_a_comparison_gives_the_new_times():
    runs = [made_up.run([made_up.result("dispatch", "add", "core", {}, [t])]) for t in (1e-6, 2e-6)]
    (point,) = compare(runs[:1], runs[1:]).points
    assert (point.time_s, point.verdict) == (2e-6, "inconclusive")


def test_other_files_are_left_alone(tmp_path: Path):
    wanted = [(name, tmp_path / name) for name in exports.FORMATS]
    for _ in range(2):
        write_exports(POINTS, wanted)
    write_exports([], wanted)
    write_exports(POINTS, wanted)
    wanted[0][1].write_text('{"kind": "gate"}')
    with pytest.raises(OutputError, match="is not a file of github"):
        write_exports(POINTS, wanted)


def test_commands_export(tmp_path: Path, dtbench: made_up.Cli):
    run = tmp_path / "run.jsonl"
    with RunWriter.create(run, made_up.header()) as writer:
        writer.append(made_up.result("dispatch", "add", "core", {}, [1e-6, 2e-6]))
        writer.end()
    out = tmp_path / "out.json"
    assert (
        dtbench("show", str(run), "--export", f"bmf:{out}", "--export", f"prometheus:{tmp_path / 'x.prom'}")[
            0
        ]
        == 0
    )
    assert list(json.loads(out.read_text())) == ["dispatch add [core]"]
    dtbench("compare", str(run), str(run), "--export", f"bmf:{out}")
    assert list(json.loads(out.read_text())) == ["dispatch add [core]"]
    for given, says in (
        ("xml:f", "expected FORMAT:FILE"),
        ("bmf:", "expected"),
        ("bmf:no/f", "there is no folder no"),
    ):
        code, _, err = dtbench("show", str(run), "--export", given)
        assert code == 2 and says in err


# ------------------------------------------------------------------------------- the comment


class GitHub(BaseHTTPRequestHandler):
    """The comments of one pull request, paged, for one token."""

    comments: list[dict[str, Any]]

    def do_GET(self) -> None:
        asked = {name: int(value[0]) for name, value in parse_qs(urlparse(self.path).query).items()}
        start = (asked["page"] - 1) * asked["per_page"]
        self._answer(200, self.comments[start : start + asked["per_page"]])

    def do_POST(self) -> None:
        assert self.path == "/repos/o/r/issues/7/comments"
        made = {"id": len(self.comments), **self._body(), "html_url": "https://github.example/c"}
        self.comments.append(made)
        self._answer(201, made)

    def do_PATCH(self) -> None:
        found = self.comments[int(self.path.removeprefix("/repos/o/r/issues/comments/"))]
        found.update(self._body())
        self._answer(200, found)

    def _body(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def _answer(self, code: int, value: object) -> None:
        if self.headers["Authorization"] != "Bearer secret":
            code, value = 403, {"message": "Resource not accessible by integration"}
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def job(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The variables of a job, whose API is a server here with two pages of other people's comments."""
    GitHub.comments = [{"id": i, "body": "looks good to me"} for i in range(100)]
    event = tmp_path / "event.json"
    event.write_text('{"pull_request": {"number": 7}}')
    with HTTPServer(("127.0.0.1", 0), GitHub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield {
            "GITHUB_API_URL": f"http://127.0.0.1:{server.server_port}",
            "GITHUB_TOKEN": "secret",
            "GITHUB_REPOSITORY": "o/r",
            "GITHUB_EVENT_PATH": str(event),
            "GITHUB_WORKFLOW": "gate --> x",
            "GITHUB_JOB": "cpu",
        }
        server.shutdown()


def test_one_comment_per_job_is_posted_and_then_renewed(job: dict[str, str]):
    for text in ("first", "second"):
        assert PullRequest.of_job(job).publish(text) == "https://github.example/c"
    PullRequest.of_job({**job, "GITHUB_JOB": "gpu"}).publish("another job")
    made = [comment["body"] for comment in GitHub.comments[100:]]
    assert [body.splitlines()[1] for body in made] == ["second", "another job"]
    assert all(body.splitlines()[0].count("-->") == 1 for body in made)


def test_a_long_comment_is_cut_between_lines_and_closed(job: dict[str, str]):
    PullRequest.of_job(job).publish("<details>\n" + "| x |\n" * MAX_CHARS)
    body = GitHub.comments[-1]["body"]
    assert len(body) < 65_536
    assert body.count("<details>") == body.count("</details>") == 1


def test_what_goes_wrong_with_a_comment_is_one_line(job: dict[str, str], tmp_path: Path):
    with pytest.raises(OutputError, match=r"answered 403.*pull-requests: write"):
        PullRequest.of_job({**job, "GITHUB_TOKEN": "another"}).publish("x")
    with pytest.raises(OutputError, match="cannot comment"):
        PullRequest.of_job({**job, "GITHUB_API_URL": "http://127.0.0.1:1"}).publish("x")
    with pytest.raises(UsageError, match="GITHUB_TOKEN is not set"):
        PullRequest.of_job({**job, "GITHUB_TOKEN": ""})
    (tmp_path / "event.json").write_text("{}")
    with pytest.raises(UsageError, match="names no pull request"):
        PullRequest.of_job(job)


@pytest.mark.parametrize("token, comments", [("secret", 1), ("another", 0)])
def test_a_gate_comments_and_exports_and_keeps_its_exit_code(
    job: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtbench: made_up.Cli,
    token: str,
    comments: int,
):
    effect, base_s, head_s = effect_and_times([(1e-5, 1.1e-5)] * 10)
    one = Benchmark(("mine", "add", "core", ()), "mine add [core]", "simulated", "min")
    slower = concluded([judged(one, Verdict.REGRESSION, "", "confirmed", effect, base_s, head_s)])
    monkeypatch.setattr("dtbench.gate.gate.gate", lambda options, say: slower)
    for name, value in {**job, "GITHUB_TOKEN": token}.items():
        monkeypatch.setenv(name, value)
    out = tmp_path / "times.json"
    arms = ("--base", "env:", "--head", "env:A=1", "mine.py")
    code, _, err = dtbench("gate", *arms, "--comment", "--export", f"bmf:{out}")
    assert code == 1
    assert ("the verdict is at https://github.example/c" in err) == bool(comments)
    assert ("GitHub answered 403" in err) != bool(comments)
    assert [comment["body"].count("| REGRESSION |") for comment in GitHub.comments[100:]] == [1] * comments
    latency = json.loads(out.read_text())["mine add [core]"]["latency"]
    assert latency["lower_value"] <= latency["value"] <= latency["upper_value"]
