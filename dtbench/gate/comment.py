"""One comment on a GitHub pull request, posted by the first gate and renewed by the next."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from dtbench.suite.errors import OutputError, UsageError, plain

# GitHub takes 65,536 characters; what is cut is said.
MAX_CHARS = 60_000
_PER_PAGE = 100
_TIMEOUT_S = 30


_T = TypeVar("_T")


class _Comment(msgspec.Struct):
    """As GitHub tells it."""

    id: int
    body: str | None = None
    html_url: str = ""


@dataclass(frozen=True)
class PullRequest:
    """Where the comment goes. mark: its hidden first line, by which the next gate of the same job finds it."""

    comments_url: str
    api_url: str
    token: str
    mark: str

    @classmethod
    def of_job(cls, environ: Mapping[str, str] = os.environ) -> PullRequest:
        """The pull request that this job of GitHub Actions runs for.

        Raises:
            UsageError: no such job, or a variable is missing.
        """
        missing = [
            name
            for name in ("GITHUB_TOKEN", "GITHUB_REPOSITORY", "GITHUB_EVENT_PATH")
            if not environ.get(name)
        ]
        if missing:
            raise UsageError(
                f"--comment is for jobs of GitHub Actions on pull requests, but {', '.join(missing)} is not set; "
                f"the token is given with `env: GITHUB_TOKEN: ${{{{ github.token }}}}`"
            )
        try:
            event = json.loads(Path(environ["GITHUB_EVENT_PATH"]).read_text(encoding="utf-8"))
            number = int(event["pull_request"]["number"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                "--comment: the job's event names no pull request; expected `on: pull_request`, or leave it out"
            ) from error
        api = environ.get("GITHUB_API_URL") or "https://api.github.com"
        base = f"{api}/repos/{environ['GITHUB_REPOSITORY']}/issues"
        job = "/".join(environ.get(name, "") for name in ("GITHUB_WORKFLOW", "GITHUB_JOB"))
        safe = plain(job).replace("--", "- -").replace(">", "")
        return cls(
            f"{base}/{number}/comments",
            f"{base}/comments",
            environ["GITHUB_TOKEN"],
            f"<!-- dtbench {safe} -->",
        )

    def publish(self, markdown: str) -> str:
        """Posts the text, or puts it into the comment of the gate before; that comment's page.

        Raises:
            OutputError: GitHub cannot be reached or refuses.
        """
        body = {"body": f"{self.mark}\n{_cut(markdown)}"}
        found = self._find()
        if found is None:
            made = self._ask("POST", self.comments_url, _Comment, body)
        else:
            made = self._ask("PATCH", f"{self.api_url}/{found}", _Comment, body)
        return made.html_url

    def _find(self) -> int | None:
        page = 1
        while True:
            url = f"{self.comments_url}?per_page={_PER_PAGE}&page={page}"
            comments = self._ask("GET", url, list[_Comment])
            for comment in comments:
                if (comment.body or "").startswith(self.mark):
                    return comment.id
            if len(comments) < _PER_PAGE:
                return None
            page += 1

    def _ask(self, method: str, url: str, kind: type[_T], body: Mapping[str, str] | None = None) -> _T:
        request = urllib.request.Request(
            url,
            data=None if body is None else json.dumps(body).encode(),
            method=method,
            headers={"Authorization": f"Bearer {self.token}", "Accept": "application/vnd.github+json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                return msgspec.json.decode(answer.read(), type=kind)
        except urllib.error.HTTPError as error:
            remedy = "; the job needs `permissions: pull-requests: write`, which pull requests from forks never get"
            raise OutputError(
                f"cannot comment on the pull request: GitHub answered {error.code} {plain(error.reason)}"
                f"{remedy if error.code in (401, 403, 404) else ''}"
            ) from error
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise OutputError(f"cannot comment on the pull request: {plain(str(error))}") from error


def _cut(markdown: str) -> str:
    if len(markdown) <= MAX_CHARS:
        return markdown
    kept = markdown[:MAX_CHARS].rpartition("\n")[0]
    closing = "\n\n</details>" if kept.count("<details>") > kept.count("</details>") else ""
    return f"{kept}{closing}\n\nThe rest stands in the job's summary.\n"
