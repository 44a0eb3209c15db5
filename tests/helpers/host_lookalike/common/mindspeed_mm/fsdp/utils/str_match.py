"""Names of modules against the patterns of a plan: `{*}` stands for any number, `*` for anything."""

import re


def module_name_match(pattern: str, string):
    parts = re.split(r"(\{\*\}|\*)", pattern)
    regex = "".join({"{*}": r"\d+", "*": ".*"}.get(part, re.escape(part)) for part in parts)
    return re.fullmatch(regex, string) is not None
