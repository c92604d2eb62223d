"""The command line: `inkling-portable COMMAND ...`, each command a module in `commands/`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import signal
import sys

from inkling_portable import __version__, commands
from inkling_portable.commands._options import OptionError


def available() -> dict[str, str]:
    """Command names and the first line of each module's docstring, found without importing them."""
    found = {}
    for module in pkgutil.iter_modules(commands.__path__):
        if module.name.startswith("_") or "_" in module.name:
            continue
        spec = importlib.util.find_spec(f"inkling_portable.commands.{module.name}")
        assert spec is not None and spec.origin is not None
        with open(spec.origin, encoding="utf-8") as source:
            found[module.name] = source.readline().strip().strip('"').rstrip(".")
    return found


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit status (2 for a request that cannot be understood)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:  # ends as Ctrl-C does, and with it the servers that a command has started
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    known = available()
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print("usage: inkling-portable COMMAND [options]; COMMAND --help explains its options\n")
        width = max(map(len, known))
        print("\n".join(f"  {name:{width}}  {summary}" for name, summary in sorted(known.items())))
        return 0
    if arguments[0] == "--version":
        print(f"inkling-portable {__version__}")
        return 0
    if arguments[0] not in known:
        print(f"inkling-portable: there is no command {arguments[0]!r}; commands are "
              f"{', '.join(sorted(known))}", file=sys.stderr)  # fmt: skip
        return 2
    command = importlib.import_module(f"inkling_portable.commands.{arguments[0]}")
    try:
        status: int = command.main(arguments[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever reads, such as `head`, has seen enough; nothing is left to write at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OptionError as error:
        print(f"inkling-portable {arguments[0]}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"inkling-portable {arguments[0]}: interrupted", file=sys.stderr)
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
