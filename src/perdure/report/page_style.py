"""The style sheet of every page, light and dark, wide and narrow, with the contrast of WCAG AA."""

LEVELS = 10
"""Steps of the colour scale of a heat map."""

SERIES = 6
"""Colours of lines; more lines begin again, with another dash."""

# Backgrounds of the scale, and whether its text is light; from pale to deep, and in the dark the other
# way round.
_LIGHT = [
    "eef3f7",
    "dde8f0",
    "cadbe8",
    "b3cbde",
    "9abad2",
    "7fa6c5",
    "3f719c",
    "2f618d",
    "22507b",
    "164068",
]
_DARK = [
    "1c242c",
    "20303d",
    "24394b",
    "28445b",
    "2c4f6c",
    "31597d",
    "7fb0dc",
    "93bfe6",
    "a9cff0",
    "c2e0f8",
]
_LINES = ["1f5f8b", "b3541e", "2f7236", "7a4fa0", "86650a", "a8326e"]
_LINES_DARK = ["79b5e6", "f0a070", "7fcf87", "c3a0ea", "dcb950", "f08fbc"]


def _scale(colours: list[str], low: str, high: str) -> str:
    return " ".join(
        f".l{level}{{background:#{colour};color:{low if level < 6 else high}}}"
        for level, colour in enumerate(colours)
    )


def _lines(colours: list[str]) -> str:
    return " ".join(
        f".s{n} {{ stroke: #{colour}; color: #{colour} }} .k{n} {{ background: #{colour} }}"
        for n, colour in enumerate(colours)
    )


STYLE = f"""
:root {{ color-scheme: light dark; --ground: #fafaf8; --sheet: #ffffff; --ink: #1c2126; --soft: #57606a;
  --rule: #dfe2e6; --accent: #1f5f8b; --bar: #c9dcea; --bar-ink: #123a57; --good: #116329;
  --bad: #b42318; --warn: #7a4d00; --good-ground: #e6f3e9; --bad-ground: #fcebe9;
  --warn-ground: #faf0dc; --plain-ground: #eceef0 }}
* {{ box-sizing: border-box }}
body {{ margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  -webkit-text-size-adjust: 100%; text-size-adjust: 100% }}
main {{ max-width: 70rem; margin: 0 auto; padding: 2.5rem 1.5rem 5rem }}
h1 {{ font-size: 1.75rem; line-height: 1.25; font-weight: 650; letter-spacing: -.015em;
  margin: 0 0 .4rem; overflow-wrap: anywhere }}
h2 {{ font-size: 1.2rem; line-height: 1.3; font-weight: 650; margin: 0 0 1rem;
  overflow-wrap: anywhere }}
h3 {{ font-size: 1rem; font-weight: 650; margin: 1.75rem 0 .6rem; overflow-wrap: anywhere }}
p {{ margin: .5rem 0; max-width: 46rem; overflow-wrap: anywhere }}
section {{ margin-top: 2.75rem }}
section section {{ margin-top: 2rem }}
.pair {{ display: grid; gap: 0 3rem;
  grid-template-columns: repeat(auto-fit, minmax(min(24rem, 100%), 1fr)) }}
.pair section {{ margin-top: 0 }} .pair h3 {{ margin-top: .5rem }}
main > section {{ border-top: 1px solid var(--rule); padding-top: 1.4rem }}
a {{ color: var(--accent) }}
code, pre {{ font-size: .86em;
  font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace }}
code {{ overflow-wrap: anywhere }}
.whole {{ white-space: nowrap }}
pre {{ background: var(--plain-ground); padding: .75rem; border-radius: 6px; overflow-x: auto;
  white-space: pre-wrap; overflow-wrap: anywhere }}
ul {{ margin: .5rem 0; padding-left: 1.2rem; max-width: 46rem }}
li {{ overflow-wrap: anywhere }}
.kicker {{ font-size: .8rem; letter-spacing: .06em; color: var(--soft); margin: 0 0 .35rem }}
.note {{ font-size: .85rem; color: var(--soft) }}
.tiles {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .75rem;
  margin: 1.5rem 0 0 }}
.tile {{ background: var(--sheet); border: 1px solid var(--rule); border-radius: 8px;
  padding: .7rem .85rem }}
.tile dt {{ font-size: .8rem; color: var(--soft) }}
.tile dd {{ margin: .1rem 0 0; font-size: 1.3rem; line-height: 1.3; font-weight: 600;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere }}
.facts {{ display: grid; grid-template-columns: minmax(8rem, max-content) 1fr; gap: .3rem 1.25rem;
  margin: .75rem 0; font-size: .92rem }}
.facts dt {{ color: var(--soft); overflow-wrap: anywhere }}
.facts dd {{ margin: 0; overflow-wrap: anywhere }}
.scroll {{ overflow-x: auto; margin: .75rem 0 }}
.scroll:focus-visible {{ outline: 2px solid var(--accent); outline-offset: 2px }}
table {{ border-collapse: collapse; width: 100%; font-size: .88rem }}
th, td {{ text-align: left; padding: .4rem 1.1rem .4rem 0; border-bottom: 1px solid var(--rule);
  vertical-align: top }}
th {{ font-weight: 500; color: var(--soft); white-space: nowrap }}
td {{ overflow-wrap: break-word; max-width: 26rem }}
td.n, th.n {{ text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }}
.badge {{ display: inline-block; border-radius: 4px; padding: 0 .45em; font-size: .82em;
  font-weight: 600; line-height: 1.6; white-space: nowrap }}
.good {{ color: var(--good); background: var(--good-ground) }}
.bad {{ color: var(--bad); background: var(--bad-ground) }}
.warn {{ color: var(--warn); background: var(--warn-ground) }}
.plain {{ color: var(--ink); background: var(--plain-ground) }}
.verdict {{ font-weight: 600; padding: .7rem .9rem; border-radius: 8px; margin: 0 0 1.5rem;
  max-width: none }}
.share {{ display: inline-flex; width: 5rem; height: .55rem; border-radius: 3px; overflow: hidden;
  background: var(--bar) }}
.share i {{ background: var(--accent) }}
.row {{ display: grid; grid-template-columns: 12rem 1fr; gap: .25rem 1rem; margin: .3rem 0;
  align-items: center }}
.label {{ font-size: .85rem; text-align: right; overflow-wrap: anywhere }}
.track {{ position: relative; height: 1.5rem; background: var(--plain-ground); border-radius: 4px;
  overflow: hidden }}
.bar {{ position: absolute; top: 0; height: 100%; min-width: 2px; background: var(--bar);
  border-right: 1px solid var(--sheet); font-size: .72rem; line-height: 1.5rem; padding-left: .3rem;
  overflow: hidden; white-space: nowrap; color: var(--bar-ink) }}
.mark {{ position: absolute; top: 0; width: 3px; margin-left: -1.5px; height: 100%;
  background: var(--bad) }}
.axis {{ display: flex; justify-content: space-between; font-size: .78rem; color: var(--soft);
  font-variant-numeric: tabular-nums }}
.legend {{ display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; font-size: .85rem; margin: .5rem 0;
  align-items: center }}
.legend span {{ display: inline-flex; align-items: center; gap: .4rem; overflow-wrap: anywhere }}
.key {{ display: inline-block; width: 1.2rem; height: .3rem; border-radius: 2px; flex: none }}
svg.linekey {{ width: 1.75rem; height: .375rem; stroke-width: 3 }}
.key.markkey {{ width: 3px; height: .9rem; background: var(--bad) }}
.key.barkey {{ height: .8rem; background: var(--bar) }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(21rem, 100%), 1fr));
  gap: 1.25rem }}
figure {{ margin: 0; background: var(--sheet); border: 1px solid var(--rule); border-radius: 8px;
  padding: .8rem .8rem .5rem; min-width: 0 }}
figcaption {{ font-size: .9rem; font-weight: 600; display: flex; flex-wrap: wrap; gap: 0 .75rem;
  justify-content: space-between; overflow-wrap: anywhere }}
figcaption span {{ font-weight: 400; color: var(--soft); font-variant-numeric: tabular-nums }}
svg {{ display: block; width: 100%; height: auto }}
svg text {{ font: 11px system-ui, sans-serif; fill: var(--soft); font-variant-numeric: tabular-nums }}
svg .grid {{ stroke: var(--rule); stroke-width: 1 }}
svg .cut {{ stroke: var(--bad); stroke-width: 1; stroke-dasharray: 3 3 }}
svg polyline {{ fill: none; stroke-width: 1.75; stroke-linejoin: round; stroke-linecap: round }}
svg circle {{ stroke-width: 0; fill: currentColor }}
.heat {{ width: auto; min-width: 50%; border-collapse: separate; border-spacing: 2px;
  font-size: .8rem }}
.heat th {{ border: 0; padding: .15rem .6rem .15rem 0 }}
.heat thead th {{ text-align: center; padding: .15rem .3rem; font-variant-numeric: tabular-nums }}
.heat tbody th {{ color: var(--ink); position: sticky; left: 0; background: var(--ground);
  max-width: 16rem; overflow: hidden; text-overflow: ellipsis }}
.heat td {{ border: 0; border-radius: 3px; padding: .15rem .4rem; text-align: center; min-width: 3.6rem;
  font-variant-numeric: tabular-nums; white-space: nowrap }}
.heat td.same, .heat td.none {{ color: var(--soft) }}
.swatch {{ display: inline-block; width: 1.1rem; height: .8rem }}
{_scale(_LIGHT, "#1c2126", "#ffffff")}
{_lines(_LINES)}
@media (max-width: 40rem) {{
  main {{ padding: 1.5rem 1rem 3rem }}
  h1 {{ font-size: 1.4rem }}
  .tiles {{ grid-template-columns: 1fr 1fr; gap: .5rem }}
  .tile dd {{ font-size: 1.1rem }}
  .facts {{ grid-template-columns: minmax(6rem, 38%) 1fr }}
  table {{ width: max-content; min-width: 100% }}
  .row {{ grid-template-columns: 1fr; margin: .7rem 0 }}
  .label {{ text-align: left }}
  .heat tbody th {{ min-width: 8.5rem; max-width: 8.5rem; white-space: normal;
    overflow-wrap: break-word; font-size: .75rem; line-height: 1.25 }}
}}
@media (prefers-color-scheme: dark) {{
  :root {{ --ground: #14171a; --sheet: #1a1e22; --ink: #e4e7ea; --soft: #9ca6b0; --rule: #2e343a;
    --accent: #79b5e6; --bar: #2c4f6c; --bar-ink: #e4eef7; --good: #7fd394; --bad: #ff9388;
    --warn: #f0c060; --good-ground: #16301d; --bad-ground: #3d1f1c; --warn-ground: #362a12;
    --plain-ground: #22272c }}
  {_scale(_DARK, "#e4e7ea", "#14171a")}
  {_lines(_LINES_DARK)}
}}
@media print {{ main {{ max-width: none; padding: 0 }} section {{ break-inside: avoid-page }} }}
"""
