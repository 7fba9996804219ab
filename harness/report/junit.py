"""A run as JUnit XML, which every CI system shows: a suite per kernel, a test case per case."""

import re
import xml.etree.ElementTree as ElementTree

from ..record import Record, Verdict
from .run_folder import SET_ASIDE, Run, failed
from .run_summary import failing_gates, ratio_text, said, settings

# what XML 1.0 cannot hold, such as the colour codes in a compiler's message
_UNPRINTABLE = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_report(run: Run) -> str:
    """The XML text."""
    root = ElementTree.Element("testsuites", name="assay")
    _count(root, list(run.records))
    for kernel in run.kernels:
        mine = run.of_kernel(kernel)
        suite = ElementTree.SubElement(root, "testsuite", name=_text(kernel))
        _count(suite, mine)
        properties = ElementTree.SubElement(suite, "properties")
        for name, value in settings(run):
            ElementTree.SubElement(properties, "property", name=_text(name), value=_text(value))
        for record in mine:
            _add_case(suite, record)
        if run.notes:
            ElementTree.SubElement(suite, "system-err").text = _text("\n".join(run.notes))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _count(element: ElementTree.Element, records: list[Record]) -> None:
    errors = sum(record.verdict is Verdict.HARNESS_ERROR for record in records)
    counts = {
        "tests": len(records),
        "failures": sum(failed(record.verdict) for record in records) - errors,
        "errors": errors,
        "skipped": sum(record.verdict in SET_ASIDE for record in records),
    }
    for name, count in counts.items():
        element.set(name, str(count))
    element.set("time", f"{sum(record.seconds for record in records):.3f}")


def _add_case(suite: ElementTree.Element, record: Record) -> None:
    name, place = _text(record.case["id"]), _text(f"{record.op}.{record.kernel}")
    case = ElementTree.SubElement(suite, "testcase", classname=place, name=name, time=f"{record.seconds:.3f}")
    if record.verdict in SET_ASIDE:
        ElementTree.SubElement(case, "skipped", message=_text(f"{record.verdict}: {record.text}"))
    elif failed(record.verdict):
        # a fault of the judge is no fault of the kernel, and JUnit has a word for each
        kind = "error" if record.verdict is Verdict.HARNESS_ERROR else "failure"
        found = ElementTree.SubElement(case, kind, type=record.verdict.value, message=_text(record.text))
        found.text = _text("\n".join(_details(record)))


def _details(record: Record) -> list[str]:
    """Each failing gate with its place, then the command that judges the case again."""
    lines = [said(record)] if said(record) else []
    for gate in failing_gates(record):
        place = f" at {gate.where}" if gate.where else ""
        lines.append(
            f"{gate.gate}: {ratio_text(gate.ratio)} its limit{place}" + (f" ({gate.text})" if gate.text else "")
        )
    return [*lines, record.command] if record.command else lines


def _text(text: str) -> str:
    return _UNPRINTABLE.sub("\ufffd", text)
