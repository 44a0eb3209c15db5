"""What documents take from the code: tables of settings and versions, the public names, and drawings.

    python docs/make            writes what is out of date, and names it
    python docs/make --check    writes nothing, shows the differences, and exits with 1 if there are any

Run it in an environment with this package. A table is in its document between
`<!-- table: NAME -->` and `<!-- end of table -->`; everything else there is written by hand.
"""

import argparse
import sys

from documents import FILES, ROOT, current, difference


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python docs/make", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = {name: text for name in FILES if difference(name, text := current(name))}
    for name, text in stale.items():
        if check:
            print(difference(name, text), end="")
        else:
            (ROOT / name).write_text(text, encoding="utf-8")
            print(f"written: {name}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
