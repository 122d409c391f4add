"""Texts that would take a terminal over, hide something or take for ever, made by code: over 200 of them."""

from __future__ import annotations

from collections.abc import Iterator

MEGABYTE = 1_000_000

ENDS = {"bel": "\a", "st": "\x1b\\", "c1": "\x9c", "none": ""}
STRINGS = {"osc": "\x1b]", "dcs": "\x1bP", "apc": "\x1b_", "pm": "\x1b^", "sos": "\x1bX", "osc-c1": "\x9d"}
COMMANDS = {
    "title": "0;owned",
    "clipboard": "52;c;ZXZpbA==",
    "clipboard-query": "52;c;?",
    "link": "8;;file:///etc/passwd",
    "notify": "777;notify;a;b",
    "palette": "4;1;?",
    "image": "1337;File=inline=1:AAAA",
    "sixel": "q#0;2;0;0;0#0!999~",
    "tmux": "tmux;\x1b\x1b]52;c;ZXZpbA==\a",
    "kitty": "Ga=T,f=100;AAAA",
}
CSI = (
    *(
        "2J",
        "H",
        "31m",
        "0m",
        "8m",
        "5;7m",
        "?1049l",
        "?1049h",
        "?25l",
        "?2004l",
        "?1003h",
        "?2026h",
        "6n",
        "c",
    ),
    *(
        ">c",
        "=c",
        "5n",
        "21t",
        "18t",
        "8;1;1t",
        "3J",
        "1000S",
        "1;1r",
        "!p",
        "?5h",
        "20h",
        "0 q",
        "99999999999m",
    ),
)
PLAIN_ESCAPES = (
    "c",
    "7",
    "8",
    "D",
    "E",
    "M",
    "N",
    "O",
    "Z",
    "=",
    ">",
    "#8",
    "(0",
    ")0",
    "%G",
    "\x1b",
    "[",
    "]",
)
MARKUP = (
    "[bold red]loud[/]",
    "[/]",
    "[/bold]",
    "[link=file:///etc/passwd]here[/link]",
    "[@click=app.quit]here[/]",
    "[@click=app.bell()]ring[/]",
    "[on red] [reverse]",
    "[$accent]colour[/$accent]",
    "[bold",
    "[[bold]]",
    "\\[bold]",
    "[#zzzzzz]x[/]",
    "[rgb(1,2,3)]x",
    ":smiley: :skull:",
    "$label {label} %s {0.__class__}",
)
LINKS = (
    "[here](javascript:alert(1))",
    "[here](file:///etc/passwd)",
    "[here](data:text/html,<script>)",
    "[here](vbscript:x)",
    "[here](ssh://host)",
    "[here](https://example.org/\x1b]8;;evil\a)",
    "[https://good.example](https://evil.example)",
    "<javascript:alert(1)>",
    "<https://example.org>",
    "<mailto:a@b.example>",
    "![image](https://tracker.example/pixel.png)",
    "![image](file:///etc/passwd)",
    "[ref]: javascript:alert(1)",
    "[a](<b\x1bc>)",
    "[a](https://\u202egro.elpmaxe)",
)
ENTITIES = (
    "&#27;[2J",
    "&#x1b;]52;c;eA==&#7;",
    "&#x9b;31m",
    "&#155;2J",
    "&#0;",
    "&#xd800;",
    "&#x202e;abc",
    "&Tab;&NewLine;",
)
INVISIBLE = {
    "rlo": "\u202e",
    "lro": "\u202d",
    "rle": "\u202b",
    "pdf": "\u202c",
    "rli": "\u2067",
    "fsi": "\u2068",
    "pdi": "\u2069",
    "rlm": "\u200f",
    "alm": "\u061c",
    "zwsp": "\u200b",
    "zwnj": "\u200c",
    "zwj": "\u200d",
    "word-joiner": "\u2060",
    "bom": "\ufeff",
    "soft-hyphen": "\u00ad",
    "invisible-times": "\u2062",
    "mongolian": "\u180e",
    "annotation": "\ufff9",
    "musical": "\U0001d173",
    "shorthand": "\U0001bca0",
    "tag": "\U000e0041",
    "selector-17": "\U000e0100",
    "combining": "\u0301",
    "enclosing": "\u20dd",
    "vs16": "\ufe0f",
}
BREAKS = {
    "vt": "\v",
    "ff": "\f",
    "cr": "\r",
    "nel": "\x85",
    "ls": "\u2028",
    "ps": "\u2029",
    "fs": "\x1c",
    "tab": "\t",
}
EMOJI = (
    "❤️ ✈️ ☎️",
    "👩‍👩‍👧‍👦 👨🏽‍🚀 🏴‍☠️",
    "🏴\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f",
    "🇩🇪🇫🇷🇯",
    "1️⃣ #️⃣",
    "\ufe0f" * 50,
    "a\ufe0fb\ufe0e",
)
SURROGATES = ("\ud800", "\udc00x", "a\udbffb", "\ud83d\ude00", "\udc1b[2J")
LONG = {
    "word": "x" * MEGABYTE,
    "words": "word " * (MEGABYTE // 5),
    "wide": "漢" * (MEGABYTE // 2),
    "escapes": "\x1b[2J" * (MEGABYTE // 4),
    "zero-width": "a" + "\u200b" * MEGABYTE,
    "combining": "a" + "\u0301" * MEGABYTE,
    "joiners": "👩\u200d" * (MEGABYTE // 4),
    "brackets": "[" * 50_000,
    "stars": "*" * 50_000,
    "stars-apart": "*a " * 20_000,
    "underscores": "_a" * 20_000,
    "backticks": "`" * 50_000,
    "backtick-runs": " ".join("`" * (n % 200 + 1) for n in range(2_000)),
    "quotes": "> " * 20_000,
    "bullets": "- " * 20_000,
    "table": "|a" * 5_000 + "|\n" + "|-" * 5_000 + "|\n" + "|b" * 5_000 + "|",
    "links": "[a](" * 10_000,
    "images": "![" * 20_000,
    "angles": "<" * 50_000,
    "tildes": "~~a" * 10_000,
    "ampersands": "&" * 100_000,
    "backslashes": "\\" * 100_000,
    "code": "```python\n" + "(" * 100_000 + "\n```",
    "code-lines": "```c\n" + "x = 1;\n" * 5_000 + "```",
    "lines": "\n" * 50_000,
    "tabs": "\t" * 50_000,
}


def _named() -> Iterator[tuple[str, str]]:
    for number, code in enumerate(CSI):
        yield f"csi-{number}", f"a\x1b[{code}b"
        yield f"csi-c1-{number}", f"a\x9b{code}b"
    for number, code in enumerate(PLAIN_ESCAPES):
        yield f"escape-{number}", f"a\x1b{code}b"
    for opener, start in STRINGS.items():
        for command, body in COMMANDS.items():
            end = list(ENDS)[len(opener + command) % len(ENDS)]
            yield f"{opener}-{command}-{end}", f"a{start}{body}{ENDS[end]}b"
    yield "c0", "".join(map(chr, range(0x20))) + "\x7f"
    yield "c1", "".join(map(chr, range(0x80, 0xA0)))
    yield "bells", "\a" * 1000
    yield "backspaces", "safe\b\b\b\bevil"
    for kind, texts in (("markup", MARKUP), ("link", LINKS), ("entity", ENTITIES), ("emoji", EMOJI)):
        yield from ((f"{kind}-{number}", text) for number, text in enumerate(texts))
    for number, text in enumerate(SURROGATES):
        yield f"surrogate-{number}", text
    for name, character in INVISIBLE.items():
        yield f"invisible-{name}", f"user{character}gnp.exe"
        yield f"flood-{name}", "a" + character * 5_000 + "b"
    for name, character in BREAKS.items():
        yield f"break-{name}", f"one{character}two{character * 3}three"
        yield f"code-{name}", f"```\none{character}two\n```"


SHORT: dict[str, str] = dict(_named())
"""By name; each at most some thousand characters."""
HOSTILE: dict[str, str] = SHORT | {f"long-{name}": text for name, text in LONG.items()}
"""All of them."""
