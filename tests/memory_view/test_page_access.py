"""The page works by keyboard, with screen readers, in light and dark, and on small screens."""

import pytest

from tests.memory_view.conftest import OpenPage, RecordingOf
from tests.memory_view.test_page import go_to
from tests.support.long import long

CONTROLS = """() => Array.from(
  document.querySelectorAll("button, input, select, summary, canvas, [tabindex='0']"))
  .filter(each => each.checkVisibility()).map(each => (each.dataset.control ??=
    each.id || each.ariaLabel || each.textContent))"""
FOCUSED = "() => document.activeElement.dataset.control ?? ''"


@pytest.mark.parametrize("scheme", ["light", *long("dark")])
def test_axe_finds_nothing(scheme: str, recording_of: RecordingOf, open_page: OpenPage) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    recording = recording_of("two ranks")
    # axe is a script of its own, which the page's policy would refuse
    page = open_page(recording.url, color_scheme=scheme, bypass_csp=True)
    go_to(page, len(recording.frames) // 2)
    for is_open in (False, True):
        if is_open:
            for button in page.locator(".table-toggle").all():
                button.click()
            page.locator("#maps canvas").first.click(position={"x": 30, "y": 12})
            page.locator("#page-details .history").wait_for()
        results = axe.Axe().run(page)
        assert results.violations_count == 0, results.generate_report()


def test_tab_reaches_every_control(recording_of: RecordingOf, open_page: OpenPage) -> None:
    page = open_page(recording_of("two ranks").url)
    go_to(page, 30)
    controls = page.evaluate(CONTROLS)
    assert len(controls) == len(set(controls)) > 25
    reached = []
    for _ in range(len(controls) + 1):
        page.keyboard.press("Tab")
        reached.append(page.evaluate(FOCUSED))
    assert set(controls) <= set(reached)


def test_keys_move_the_slider_and_the_cursor(
    recording_of: RecordingOf, open_page: OpenPage
) -> None:
    page = open_page(recording_of("two ranks").url)
    page.locator("#position").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("html[data-number='1']", state="attached")
    page.locator("#step-on").press("Enter")
    page.wait_for_selector("html[data-number='2']", state="attached")
    canvas = page.locator("#maps canvas").first
    canvas.focus()
    for key, expected in (
        ("ArrowRight", "page 0, reserved"), ("ArrowRight", "page 1,"), ("End", "page 23,"),
        ("ArrowLeft", "page 22,"), ("Home", "page 0,"),
    ):  # fmt: skip
        page.keyboard.press(key)
        assert (canvas.get_attribute("aria-valuetext") or "").startswith(expected)
    page.keyboard.press("+")
    page.keyboard.press("Enter")
    page.locator("#page-details .history").wait_for()
    page.keyboard.press("Escape")
    page.locator("#page-details .history").wait_for(state="detached")


def test_space_plays_and_pauses_a_recording(recording_of: RecordingOf, open_page: OpenPage) -> None:
    page = open_page(recording_of("two ranks").url)
    page.keyboard.press(" ")
    page.wait_for_function("() => document.documentElement.dataset.number > 2")
    page.keyboard.press(" ")
    page.wait_for_timeout(500)
    stopped_at = page.locator("html").get_attribute("data-number")
    page.wait_for_timeout(500)
    assert page.locator("html").get_attribute("data-number") == stopped_at


def test_a_table_is_still_while_somebody_reads_it(
    recording_of: RecordingOf, open_page: OpenPage
) -> None:
    page = open_page(recording_of("two ranks").url)
    go_to(page, 40)
    page.locator("#balance .table-toggle").click()
    table = page.locator("#balance .table")
    table.focus()
    page.wait_for_timeout(1100)
    before = table.inner_text()
    page.evaluate("() => document.querySelector('#position').value = 20")
    page.locator("#position").dispatch_event("input")
    page.wait_for_selector("html[data-number='20']", state="attached")
    page.wait_for_timeout(1500)
    assert table.inner_text() == before
    page.locator("#play").focus()
    page.mouse.move(0, 0)
    page.wait_for_timeout(1500)
    assert table.inner_text() != before


@pytest.mark.parametrize("width", [380, *long(700, 1600), 3840])
def test_nothing_is_wider_than_the_screen(
    width: int, recording_of: RecordingOf, open_page: OpenPage
) -> None:
    for name in ("states", "65,536 pages"):
        recording = recording_of(name)
        page = open_page(recording.url, viewport={"width": width, "height": 900})
        go_to(page, len(recording.frames) // 2)
        assert page.evaluate("() => document.documentElement.scrollWidth") <= width
