"""Reader of JUnit XML reports.

A test's own text must not lose the verdicts of the others, and many tools write that text as it is.
So before a report is parsed, whatever XML forbids and cannot be markup is replaced: control
characters, references to them, undefined entities, and bytes that are not of the encoding.
"""

import re
from xml.etree import ElementTree as ET
from xml.parsers import expat

from tugline.evaluators.scoring import TestOutcome, TestReport, decode_marked

_ENCODING = re.compile(rb"""\s*<\?xml\b[^>]{0,200}?\bencoding\s*=\s*["']([\w.-]+)["']""")
_CODECS = re.compile(
    r"utf-?8|(us-)?ascii|(iso-?8859|windows)-\d+|latin-?1|cp\d+|gbk|gb2312|gb18030|big5"
    r"|shift[-_]jis|euc-(jp|kr)|koi8-[ru]",
    re.IGNORECASE,
)
_DECLARATION = re.compile(r"\s*<\?xml\b[^>]{0,200}\?>")
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")
_REFERENCE = re.compile(r"&(?:#x([0-9a-fA-F]{1,8});|#([0-9]{1,8});|(?:lt|gt|amp|quot|apos);)?")
_NO_MARKUP = re.compile(r"<(?![^\W\d]|[/!?:])")
_TAG = re.compile(
    r"<!--.*?(?:-->|\Z)|<!\[CDATA\[.*?(?:\]\]>|\Z)"
    r"""|<[^\W\d](?:[^<>"']++|"[^"]*+"|'[^']*+')*+>?""",
    re.DOTALL,
)
_VALUE = re.compile(r"""(?<==)"[^"]*"|(?<==)'[^']*'""")
_HIDDEN = 0xF0000
"""First of the private characters that stand for control characters while XML is parsed."""
_SHOWN = {_HIDDEN + code: code for code in range(32)}

_FAILED = frozenset({"failure", "error"})
_SKIPPED = frozenset({"skipped", "skip", "ignored", "disabled", "notrun", "suppressed", "pending"})
_PASSED_WORDS = frozenset(
    {"completed", "executed", "expected", "finished", "ok", "pass", "passed", "ran", "run"}
    | {"succeeded", "success", "successful", "true"}
)
"""Values of `status` and `result` of a test that may have passed."""
_FAILED_WORDS = frozenset(
    {"aborted", "broken", "crashed", "error", "errored", "fail", "failed", "failure", "timeout"}
)


def normalize_junit(name: str) -> str:
    """Return ``classname::name`` for a node id of pytest, of a file of any kind."""
    path, _, rest = name.partition("::")
    names, bracket, case = rest.partition("[")
    *groups, title = names.split("::")
    classname = ".".join([path.replace("/", ".").removesuffix(".py"), *groups])
    return f"{classname}::{title}{bracket}{case}" if rest else name


def read_junit(data: bytes) -> TestReport:
    """Read a JUnit XML report, as written by pytest, Maven, Gradle, gotestsum and others.

    Names are ``classname::name``, such as ``tests.test_bill.TestZero::test_zero``. A test that was
    skipped or did not run has not passed. A truncated report has no results.
    """
    report = TestReport()
    report.complete = _add_junit(report, data)
    return report


def read_pytest(data: bytes) -> TestReport:
    """Read the concatenated reports of all pytest runs of a command; all must be complete."""
    report = TestReport()
    # pytest escapes the output of tests, so an XML declaration cannot be inside of a report.
    runs = re.split(rb"(?=<\?xml )", data)
    whole = [_add_junit(report, run) for run in runs if run.strip()]
    report.complete = bool(whole) and all(whole)
    return report


def _add_junit(report: TestReport, data: bytes) -> bool:
    """Add the results of one report; return whether it is complete."""
    try:
        root = _parse_xml(_repair(_decode_xml(data)))
    except (expat.ExpatError, LookupError):
        return False
    for case in root.iter():
        if _local_name(case) == "testcase":
            classname, title = (
                case.get(key, "").translate(_SHOWN) for key in ("classname", "name")
            )
            outcome, reason = _read_case(case)
            report.add(f"{classname}::{title}" if classname else title, outcome, reason)
    return _local_name(root) in {"testsuites", "testsuite"}


def _read_case(case: ET.Element) -> tuple[TestOutcome, str]:
    """Return a test's outcome, by its elements and its `status` and `result`, and the reason."""
    outcome = TestOutcome.PASS
    reason = ""
    for key in ("status", "result"):
        word = case.get(key, "").strip().lower()
        if word and word not in _PASSED_WORDS and outcome is not TestOutcome.FAIL:
            outcome = TestOutcome.FAIL if word in _FAILED_WORDS else TestOutcome.SKIP
            reason = f"{key} is {word!r}"
    for child in case:
        tag = _local_name(child)
        if tag in _FAILED or (tag in _SKIPPED and outcome is not TestOutcome.FAIL):
            reason = (child.get("message") or child.text or tag).translate(_SHOWN)
            if tag in _FAILED:
                return TestOutcome.FAIL, reason
            outcome = TestOutcome.SKIP
    return outcome, reason


def _local_name(element: ET.Element) -> str:
    return element.tag.rpartition(":")[2]


# --------------------------------------------------------------------------- XML
def _decode_xml(data: bytes) -> str:
    """Decode by mark or declaration. Raises `LookupError` for an unknown encoding."""
    if (text := decode_marked(data)) is not None:
        return text
    declared = _ENCODING.match(data[:400])
    codec = declared[1].decode("latin-1") if declared else "utf-8"
    if not _CODECS.fullmatch(codec):
        raise LookupError(codec)
    return data.decode(codec, errors="replace")


def _repair(text: str) -> str:
    """Replace what no XML may contain and what cannot be markup; remove the declaration."""
    text = _DECLARATION.sub("", text, count=1) if _DECLARATION.match(text) else text.lstrip()
    text = _FORBIDDEN.sub(lambda match: _hide(ord(match[0])), text)
    text = _REFERENCE.sub(_repair_reference, text)
    text = _TAG.sub(_repair_tag, text)
    return _NO_MARKUP.sub("&lt;", text)


def _repair_tag(match: re.Match[str]) -> str:
    """Escape what looks like a tag in the values of a tag's attributes."""
    tag = match[0]
    if tag.startswith("<!") or "<" not in tag[1:]:
        return tag
    return _VALUE.sub(lambda value: value[0].replace("<", "&lt;"), tag)


def _repair_reference(match: re.Match[str]) -> str:
    digits, base = (match[1], 16) if match[1] else (match[2], 10)
    if not digits:
        return match[0] if len(match[0]) > 1 else "&amp;"
    code = int(digits, base)
    legal = code in {9, 10, 13} or 0x20 <= code < 0xD800 or 0xE000 <= code < 0xFFFE
    return match[0] if legal or 0x10000 <= code <= 0x10FFFF else _hide(code)


def _hide(code: int) -> str:
    return chr(_HIDDEN + code) if code < 0x20 else "\ufffd"


def _parse_xml(text: str) -> ET.Element:
    """Parse XML whose prefixes need no declaration; expat limits the expansion of entities."""
    parser = expat.ParserCreate("utf-8")
    builder = ET.TreeBuilder()
    parser.buffer_text = True
    parser.StartElementHandler = builder.start
    parser.EndElementHandler = builder.end
    parser.CharacterDataHandler = builder.data
    parser.Parse(text.encode(), True)
    return builder.close()
