"""The subcommands of `inkling-portable`: one module each, with `main(argv) -> int`.

`inkling_portable.__main__` imports a command only when it is asked for, so a command may import
what it needs at its top.
"""
