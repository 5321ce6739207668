"""The console in a real browser, before a cluster under load: every page, both themes, both kinds of keys."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.console.served import Served

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

pytestmark = pytest.mark.browser

PAGES = ("overview", "tenants", "workers", "adapters", "requests", "costs", "playground")
WAIT_MS = 30_000
PLANTED = '<img src="x" onerror="document.title=\'broken in\'"><script>document.title="broken in"</script>'
ACCESSIBLE = Path(__file__).with_name("accessible.js").read_text(encoding="utf-8")


@contextmanager
def opened(browser: Browser, cluster: Served, theme: str = "light") -> Iterator[tuple[Page, list[str]]]:
    """A tab, and what went wrong in it."""
    context = browser.new_context(color_scheme=theme, viewport={"width": 1360, "height": 900})  # type: ignore[arg-type]
    page, problems = context.new_page(), []
    page.set_default_timeout(WAIT_MS)
    page.on("console", lambda said: problems.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda asked: None if asked.url.startswith(cluster.url) else problems.append(asked.url))
    page.on("response", lambda got: problems.append(f"{got.status} {got.url}") if got.status >= 400 else None)
    try:
        page.goto(f"{cluster.url}/console")
        yield page, problems
    finally:
        context.close()


def log_in(page: Page, key: str) -> None:
    page.get_by_label("API key or token").fill(key)
    page.keyboard.press("Enter")
    page.get_by_role("navigation").wait_for()


def shown(page: Page, name: str) -> None:
    """Waits until the page has its first numbers."""
    marks = {
        "overview": ".chart polygon",
        "tenants": "table",
        "workers": ".stack > span",
        "adapters": "tbody tr",
        "requests": "tbody tr a",
        "costs": "tbody tr",
        "playground": "#model option",
    }
    page.locator(marks[name]).first.wait_for(state="attached")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("who", ["operator", "tenant"])
def test_every_page_in_both_themes(browser: Browser, cluster: Served, theme: str, who: str, shots: Path | None) -> None:
    with opened(browser, cluster, theme) as (page, problems):
        log_in(page, cluster.operator_key if who == "operator" else cluster.keys["harbor"])
        links = page.get_by_role("navigation").get_by_role("link")
        expected = PAGES if who == "operator" else tuple(name for name in PAGES if name != "workers")
        assert [link.get_attribute("href") for link in links.all()] == [f"#/{name}" for name in expected]
        for name in expected:
            page.locator(f"nav a[href='#/{name}']").click()
            shown(page, name)
            if name == "tenants":
                page.wait_for_timeout(4000)  # shares are between two looks
            assert page.locator(f"nav a[href='#/{name}']").get_attribute("aria-current") == "page"
            assert page.evaluate(ACCESSIBLE) == [], (name, theme)
            if who == "tenant" and name != "playground":
                others = [tenant for tenant in cluster.tenants if tenant != "harbor"]
                assert [other for other in others if other in page.locator("main").inner_text()] == []
            if shots is not None:
                page.screenshot(path=shots / f"{who}-{name}-{theme}.png", full_page=True)
        if who == "operator":
            assert set(cluster.tenants) <= set(re.findall(r"\w+", page_text(page, "tenants")))
        assert problems == []


def page_text(page: Page, name: str) -> str:
    page.locator(f"nav a[href='#/{name}']").click()
    shown(page, name)
    return page.locator("main").inner_text()


def test_a_chosen_theme_stays(browser: Browser, cluster: Served) -> None:
    with opened(browser, cluster) as (page, problems):
        ground = "getComputedStyle(document.body).backgroundColor"
        before = page.evaluate(ground)
        page.locator("#theme").click()
        page.locator("#theme").click()
        assert page.locator("#theme").inner_text() == "Theme: dark"
        after = page.evaluate(ground)
        page.reload()
        assert page.evaluate(ground) == after != before
        assert problems == []


def test_the_playground_streams_and_its_request_has_a_life(
    browser: Browser, cluster: Served, shots: Path | None
) -> None:
    with opened(browser, cluster) as (page, problems):
        log_in(page, cluster.keys["harbor"])
        page.locator("nav a[href='#/playground']").click()
        shown(page, "playground")
        page.locator("#mode").select_option("text")
        page.get_by_label("Temperature").fill("0")
        assert page.locator("#model").input_value() == "upper"
        page.locator("#prompt").fill("do:m3xyz=")
        page.keyboard.press("Control+Enter")
        page.get_by_role("link", name="its life").wait_for()
        assert "M3XYZ" in page.get_by_role("log").inner_text()
        page.locator("#mode").select_option("chat")
        page.get_by_label("System message").fill("Be brief.")
        page.locator("#prompt").fill("hello")
        page.get_by_role("button", name="Send").click()
        page.get_by_role("link", name="its life").nth(1).wait_for()
        if shots is not None:
            page.screenshot(path=shots / "playground-said.png", full_page=True)
        page.get_by_role("link", name="its life").first.click()
        page.get_by_text("ended completed").wait_for()
        steps = page.locator(".steps strong").all_inner_texts()
        assert [step for step in steps if step != "longest pause ended"] == [
            "arrived", "admitted", "granted", "begun", "first token", "ended",
        ]  # fmt: skip
        if shots is not None:
            page.screenshot(path=shots / "life.png", full_page=True)
        assert problems == []


def test_a_stopped_answer_stops(browser: Browser, cluster: Served) -> None:
    with opened(browser, cluster) as (page, problems):
        log_in(page, cluster.operator_key)
        page.locator("nav a[href='#/playground']").click()
        shown(page, "playground")
        page.get_by_label("Max tokens").fill("400")
        page.locator("#mode").select_option("text")
        page.locator("#prompt").fill("a" * 60)
        page.get_by_role("button", name="Send").click()
        page.get_by_role("button", name="Stop").click(timeout=WAIT_MS)
        page.locator(".foot", has_text=re.compile("stopped|length|stop")).wait_for()
        assert page.get_by_role("button", name="Send").is_enabled()
        assert [problem for problem in problems if "ERR_ABORTED" not in problem] == []


def test_a_wrong_key_is_told_and_kept_nowhere(browser: Browser, cluster: Served) -> None:
    with opened(browser, cluster) as (page, problems):
        page.get_by_label("API key or token").fill("mlk-" + "0" * 16 + "-" + "0" * 64)
        page.keyboard.press("Enter")
        page.get_by_role("alert").wait_for()
        assert page.evaluate("sessionStorage.length + document.cookie.length") == 0
        assert all("401" in problem for problem in problems), problems
        log_in(page, cluster.keys["tern"])
        assert cluster.keys["tern"] not in page.url
        assert page.evaluate("document.cookie.length + localStorage.length") == 0
        page.reload()
        page.get_by_role("navigation").get_by_role("link").first.wait_for()
        page.get_by_role("button", name="Log out").click()
        page.get_by_label("API key or token").wait_for()
        assert page.evaluate("sessionStorage.length") == 0


def test_charts_are_read_with_the_keyboard(browser: Browser, cluster: Served) -> None:
    with opened(browser, cluster) as (page, problems):
        log_in(page, cluster.operator_key)
        shown(page, "overview")
        chart = page.locator(".chart").first
        chart.locator("svg").focus()
        page.keyboard.press("End")
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowRight")
        assert re.search(r"\d\d:\d\d:\d\d — all [\d.,]+", chart.locator(".said").inner_text())
        assert problems == []


def test_the_first_numbers_are_seen_at_once(browser: Browser, cluster: Served) -> None:
    """As when the router has just begun: one value of each series."""

    def cut(route: Route) -> None:
        response = route.fetch()
        history = response.json()
        for each in (history, *history["tenants"]):
            each["series"] = {name: values[-1:] for name, values in each["series"].items()}
        route.fulfill(response=response, json=history)

    with opened(browser, cluster) as (page, problems):
        page.route("**/console/api/history*", cut)
        log_in(page, cluster.operator_key)
        shown(page, "overview")
        widths = [area.bounding_box() for area in page.locator(".chart polygon").all()]
        assert all(box is not None and box["width"] > 2 for box in widths)
        assert problems == []


def test_names_from_outside_become_text(browser: Browser, cluster: Served) -> None:
    """As if a tenant, an adapter, a worker and an outcome had such names: checks elsewhere let none of them exist."""

    def plant(route: Route) -> None:
        response = route.fetch()
        body = response.text()
        for word in ("harbor", "upper", "worker-0", "completed", "router-0", "lumen"):
            body = body.replace(f'"{word}', f'"{PLANTED.replace(chr(34), chr(92) + chr(34))}')
        route.fulfill(response=response, body=body)

    with opened(browser, cluster) as (page, problems):
        page.route("**/console/api/**", plant)
        log_in(page, cluster.operator_key)
        for name in PAGES:
            page.locator(f"nav a[href='#/{name}']").click()
            shown(page, name)
            assert page.locator("main img, main script").count() == 0, name
            assert "broken in" not in page.title()
            if name in ("tenants", "workers", "adapters", "requests"):
                assert "<img src=" in page.locator("main").inner_text()
        assert problems == []
