"""A comparison as JUnit XML: a suite per pair of runs, a test case per gate, and one for failures."""

import re
import xml.etree.ElementTree as ElementTree

from . import report_text as text
from .comparison import Comparison, Pair
from .statistics import Verdict

# what XML 1.0 cannot hold, such as the colour codes in a server's message
_UNPRINTABLE = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_report(comparison: Comparison) -> str:
    """The XML text; what is inconclusive fails, since a test that did not say yes is not passed."""
    root = ElementTree.Element("testsuites", name=f"assay eval {comparison.suite}")
    for pair in comparison.pairs:
        suite = ElementTree.SubElement(root, "testsuite", name=_clean(text.title(pair)))
        for result in pair.gates:
            case = _case(suite, pair, result.gate.name)
            summary = f"{text.WORDS[result.verdict]}: {text.explanation(result)}"
            if result.verdict in (Verdict.REGRESSED, Verdict.INCONCLUSIVE):
                failure = ElementTree.SubElement(case, "failure", type=result.verdict.value, message=_clean(summary))
                failure.text = _clean("\n".join(_details(pair, result.verdict)))
            else:
                ElementTree.SubElement(case, "system-out").text = _clean(summary)
        case = _case(suite, pair, "every sample answered by both runs")
        if pair.failures.one_sided:
            found = ElementTree.SubElement(case, "failure", type="failures", message=text.failure_lines(pair)[0])
            found.text = _clean("\n".join(" ".join(row) for row in text.failure_rows(pair)))
        _count(suite)
    _count(root)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _case(suite: ElementTree.Element, pair: Pair, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(suite, "testcase", classname=_clean(f"{pair.first}.{pair.second}"), name=_clean(name))


def _details(pair: Pair, verdict: Verdict) -> list[str]:
    lines = [" | ".join(text.gate_cells(result)) for result in pair.gates if result.verdict is verdict]
    return [*lines, *text.divergence_lines(pair)]


def _count(element: ElementTree.Element) -> None:
    cases = list(element.iter("testcase"))
    element.set("tests", str(len(cases)))
    element.set("failures", str(sum(case.find("failure") is not None for case in cases)))
    element.set("errors", "0")


def _clean(words: str) -> str:
    return _UNPRINTABLE.sub("\ufffd", words)
