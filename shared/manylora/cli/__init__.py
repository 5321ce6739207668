"""The command line: everything on the public client, but `up` and `demo`, which start a local cluster first.

Results go to stdout (with --json as one JSON document), everything else to stderr. Exit codes: 0 done, 1 a request
failed (`CODE: message` on stderr; with --json also {"error": {"code", "message", "violations"}} on stdout), 2 wrong
usage, 130 interrupted. The modules behind a command are imported when it runs, so that --help is quick.
"""

from __future__ import annotations


def main() -> None:
    from manylora.cli.app import app

    app(prog_name="manylora")
