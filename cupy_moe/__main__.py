"""Entry of ``python -m cupy_moe``."""

import sys


def _main() -> int:
    try:
        from cupy_moe.cli import main
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("cupy_moe"):
            raise
        print(f'The command line needs {error.name}: pip install "cupy-moe[cli]"', file=sys.stderr)
        return 1
    return main()


if __name__ == "__main__":
    sys.exit(_main())
