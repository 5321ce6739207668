"""The command line, on the public client; `up` and `demo` start a local cluster first. Modules behind a command are
imported when it runs, so that --help is quick. Results go to stdout, everything else to stderr.
"""

from __future__ import annotations


def main() -> None:
    from manylora_shared.process.config import set_default

    set_default("GRPC_VERBOSITY", "ERROR")  # what it tells of handshakes stands in the error, too
    from manylora.cli.app import app

    app(prog_name="manylora")
