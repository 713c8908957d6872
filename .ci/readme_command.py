"""Prints the set-up command of README.md that follows `<!-- command: NAME -->`."""

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"


def readme_commands() -> dict[str, str]:
    """The marked commands by name, each the whole text of the bash block after its marker."""
    blocks = re.findall(
        r"^<!-- command: (\w+) -->\n+```bash\n(.*?)^```$",
        README.read_text(),
        re.MULTILINE | re.DOTALL,
    )
    return {name: text.strip() for name, text in blocks}


if __name__ == "__main__":
    print(readme_commands()[sys.argv[1]])
