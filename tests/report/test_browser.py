"""The page in a real browser. Set FEDTAIL_SCREENSHOTS to a folder to keep pictures of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedtail.report import load_runs, write_report
from fedtail.runs.record import FOLDER, AtSite, Yardstick
from tests.browser import complaints, forget, requests, start
from tests.run_folders import write_run

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("browser")
    for method, rates, level in (("fedavg", "uniform", 0.7), ("fedcgnm", "uniform", 0.8), ("fedcgnm", "fedhoo", 0.9)):
        for seed in range(3):
            folder = root / f"{method}-{rates}-{seed}"
            trouble = {3: "update is not finite"}
            write_run(
                folder, method=method, rates=rates, seed=seed, level=level, refused=trouble, scored=True, outlier=2
            )
    Yardstick(
        kind="alone",
        seed=0,
        run="fedcgnm-fedhoo-0",
        test={"macro_f1": 0.5},
        seconds=1.0,
        sites=tuple(AtSite(f"site {k}", 100, 0.5, 0.6 - 0.05 * k, 0.7) for k in range(4)),
    ).save(root / FOLDER / "alone.json")
    return write_report(load_runs([root]), root / "report.html", "Report")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    driver = start(tmp_path_factory.mktemp("profile"))
    yield driver
    driver.quit()


def show(browser: Any, page: Path, *, dark: bool = False, width: int = 1280, height: int = 900) -> None:
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(page.as_uri())
    browser.execute_script("localStorage.clear()")
    browser.get(page.as_uri())


def unfold(browser: Any) -> None:
    browser.execute_script("document.querySelectorAll('details.fold').forEach(d => { d.open = true })")


def background(browser: Any) -> tuple[int, ...]:
    colour = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    return tuple(int(v) for v in colour[4:-1].split(","))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390], ids=["desktop", "phone"])
def test_the_page_is_whole_on_any_screen(browser: Any, page: Path, dark: bool, width: int) -> None:
    forget(browser)
    show(browser, page, dark=dark, width=width)
    assert complaints(browser) == []
    asked = requests(browser, page)
    assert asked and all(url.startswith(("file:", "data:")) for url in asked)
    assert (sum(background(browser)) < 200) == dark
    unfold(browser)
    drawn = browser.execute_script(
        "return [...document.querySelectorAll('figure svg')].map(s => s.getBoundingClientRect())"
        ".filter(b => b.width > 200 && b.height > 60).length"
    )
    assert drawn == browser.execute_script("return document.querySelectorAll('figure').length") >= 30
    overflow = browser.execute_script("return document.documentElement.scrollWidth - window.innerWidth")
    assert overflow <= 0, "the page itself must not scroll sideways"
    if folder := os.environ.get("FEDTAIL_SCREENSHOTS"):
        _screenshot(browser, Path(folder) / f"report-{width}-{'dark' if dark else 'light'}.png", width)


@pytest.mark.parametrize("width", [1280, 390], ids=["desktop", "phone"])
def test_text_in_charts_does_not_overlap_and_stays_inside(browser: Any, page: Path, width: int) -> None:
    show(browser, page, width=width)
    unfold(browser)
    outside = browser.execute_script(
        """
        const bad = [];
        document.querySelectorAll("figure.chart .canvas svg").forEach(svg => {
          const frame = svg.getBoundingClientRect(), title = svg.getAttribute("aria-label").split(".")[0];
          const boxes = [...svg.querySelectorAll("text")].map(t => [t.textContent, t.getBoundingClientRect()]);
          boxes.forEach(([text, b]) => {
            const aside = b.left < frame.left - 1 || b.right > frame.right + 1;
            if (aside || b.top < frame.top - 1 || b.bottom > frame.bottom + 1)
              bad.push(title + ": '" + text + "' is cut off");
          });
          boxes.forEach(([one, a], i) => boxes.slice(i + 1).forEach(([two, b]) => {
            if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 2 && b.top < a.bottom - 2)
              bad.push(title + ": '" + one + "' lies over '" + two + "'");
          }));
        });
        return bad;
        """
    )
    assert not outside, "\n".join(outside)


def test_text_has_enough_contrast_in_both_themes(browser: Any, page: Path) -> None:
    for dark in (False, True):
        show(browser, page, dark=dark)
        colours = browser.execute_script(
            "const s = getComputedStyle(document.documentElement);"
            "return ['--bg','--card','--ink','--soft',...Array(8).keys()].map("
            "k => s.getPropertyValue(typeof k === 'number' ? '--s' + k : k).trim())"
        )
        back, card, ink, soft, *series = (_luminance(c) for c in colours)
        for text in (ink, soft):
            assert min(_contrast(text, back), _contrast(text, card)) >= 4.5
        assert min(_contrast(c, card) for c in series) >= 3.0


def test_the_button_switches_the_theme_and_the_page_remembers(browser: Any, page: Path) -> None:
    show(browser, page)
    light = background(browser)
    browser.find_element("id", "theme").click()
    dark = background(browser)
    assert sum(dark) < 200 < sum(light)
    browser.refresh()
    assert background(browser) == dark


def test_hovering_a_curve_shows_the_values_of_that_round(browser: Any, page: Path) -> None:
    from selenium.webdriver import ActionChains

    show(browser, page)
    chart = browser.find_element("css selector", "#curves figure svg")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", chart)
    ActionChains(browser).move_to_element(chart).perform()
    tip = browser.find_element("id", "tip")
    assert tip.is_displayed()
    assert tip.text.startswith("round ") and "FedCGNM + FedHOO: 0." in tip.text


def test_every_chart_can_be_read_with_the_keyboard(browser: Any, page: Path) -> None:
    from selenium.webdriver import ActionChains, Keys

    show(browser, page)
    unfold(browser)
    charts = browser.find_elements("css selector", "figure.chart .canvas svg")
    for chart in charts:
        browser.execute_script("arguments[0].scrollIntoView({block: 'center'}); arguments[0].focus()", chart)
        ActionChains(browser).send_keys(Keys.HOME, Keys.ARROW_RIGHT).perform()
        tip = browser.find_element("id", "tip")
        assert tip.is_displayed() and tip.text, chart.get_attribute("aria-label")
        ActionChains(browser).send_keys(Keys.ESCAPE).perform()
        assert not tip.is_displayed()


def test_every_chart_has_its_numbers_in_a_table_that_opens(browser: Any, page: Path) -> None:
    show(browser, page)
    unfold(browser)
    tables = browser.execute_script(
        """
        document.querySelectorAll("figure.chart > details").forEach(d => { d.open = true; });
        return new Promise(done => setTimeout(() => done(
          [...document.querySelectorAll("figure.chart")].map(f => [
            f.querySelector("figcaption").textContent,
            [...f.querySelectorAll("details tr")].map(r => [...r.cells].map(c => c.textContent)),
          ])), 500));
        """
    )
    assert all(len(rows) > 1 and len({len(row) for row in rows}) == 1 for _, rows in tables)
    found = dict(tables)
    assert found["Each site, alone and federated"][:2] == [
        ["site", "alone", "federated", "gain"],
        ["site 0", "0.600", "0.700", "+0.100"],
    ]
    curves = found["Training loss"]
    assert curves[0] == ["round", "FedAvg + U 0.6", "FedCGNM + FedHOO", "FedCGNM + U 0.6"] and len(curves) == 13
    assert [row[0] for row in curves[1:]] == [str(t) for t in range(1, 13)] and "±" in curves[1][1]
    seeds = found["Every seed: macro F1"]
    assert seeds[0] == ["", "seed 0", "seed 1", "seed 2", "mean"] and len(seeds) == 4


def test_a_cell_of_a_map_is_read_where_it_is_pointed_at(browser: Any, page: Path) -> None:
    from selenium.webdriver import ActionChains

    show(browser, page)
    cell = browser.find_element("css selector", "#federation table.heat td")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", cell)
    ActionChains(browser).move_to_element(cell).perform()
    assert browser.find_element("id", "tip").text.split("\n") == [cell.text, "site 0", "class 5"]


def test_a_legend_button_hides_its_series(browser: Any, page: Path) -> None:
    show(browser, page)
    figure = browser.find_element("css selector", "#curves figure")
    button = figure.find_elements("css selector", ".legend button")[1]
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)
    series = figure.find_elements("css selector", "g.series")[1]
    assert series.is_displayed()
    button.click()
    assert not series.is_displayed() and button.get_attribute("aria-pressed") == "false"
    button.click()
    assert series.is_displayed()


def test_a_table_sorts_by_the_keyboard_up_down_and_back(browser: Any, page: Path) -> None:
    from selenium.webdriver import Keys

    show(browser, page)
    table = browser.find_element("css selector", "#results table.sortable")
    head = table.find_elements("css selector", "thead th")[2]
    button = head.find_element("css selector", "button")

    def column() -> list[str]:
        cells = table.find_elements("css selector", "tbody:not(.rest) tr > :nth-child(3)")
        return [cell.text.split()[0] for cell in cells]

    as_it_was = column()
    states = []
    for _ in range(3):
        button.send_keys(Keys.ENTER)
        states.append((head.get_attribute("aria-sort"), column()))
    assert states == [
        ("descending", sorted(as_it_was, reverse=True)),
        ("ascending", sorted(as_it_was)),
        ("none", as_it_was),
    ]
    last = table.find_elements("css selector", "tbody")[-1]
    assert last.get_attribute("class") == "rest" and "majority" in last.text, "what is not ranked stays below"


def test_the_filter_hides_a_method_everywhere_and_shows_it_again(browser: Any, page: Path) -> None:
    show(browser, page)
    unfold(browser)
    count = "return [...document.querySelectorAll(`main [data-run='0']`)].filter(e => e.getClientRects().length).length"
    before = browser.execute_script(count)
    button = browser.find_element("css selector", ".filter button[data-run='0']")
    button.click()
    assert button.get_attribute("aria-pressed") == "false" and before > 20
    assert browser.execute_script(count) == 1, "but for the button itself"
    assert browser.find_element("css selector", ".filter .count").text == "2 of 3 shown"
    browser.find_element("css selector", ".filter .every").click()
    assert browser.execute_script(count) == before


def test_folds_open_by_the_keyboard_and_the_search_is_inside_one(browser: Any, page: Path) -> None:
    from selenium.webdriver import Keys

    show(browser, page)
    fold = browser.find_element("css selector", "#rates details.fold")
    chart = fold.find_element("css selector", "figure")
    assert not chart.is_displayed()
    fold.find_element("css selector", "summary").send_keys(Keys.ENTER)
    assert chart.is_displayed()


def test_a_wide_table_on_a_phone_says_that_it_scrolls_and_keeps_its_names(browser: Any, page: Path) -> None:
    show(browser, page, width=390)
    frame = browser.find_element("css selector", "#results .scroll")
    says = "return getComputedStyle(arguments[0], '::before').content"
    assert frame.get_attribute("data-more") == "right" and "Scroll sideways" in browser.execute_script(says, frame)
    name = frame.find_element("css selector", "tbody th")
    at = name.location["x"]
    browser.execute_script("arguments[0].scrollLeft = 9999; arguments[0].dispatchEvent(new Event('scroll'))", frame)
    assert name.location["x"] == at and frame.get_attribute("data-more") == "left"


def _screenshot(browser: Any, path: Path, width: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    height = browser.execute_script("return document.documentElement.scrollHeight")
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.save_screenshot(str(path))


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(a: float, b: float) -> float:
    return (max(a, b) + 0.05) / (min(a, b) + 0.05)
