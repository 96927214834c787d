"""The look of `report.html`: one style sheet, light or dark as the reader has it, nothing loaded from outside.

Charts that stand alone as files need its colours and the rules for charts, and nothing else of it.
"""

PALETTE = """
:root {
  color-scheme: light dark;
  --page: #fbfaf8; --card: #ffffff; --ink: #1f2328; --soft: #5c6470; --faint: #e6e4df; --accent: #2f6f9f;
  --good: #2d7d46; --warn: #a86500; --bad: #b3261e;
  --c0: #2f6f9f; --c1: #d0782a; --c2: #3d8b57; --c3: #9a4fa3; --c4: #b83a4b; --c5: #7a6a2f;
  --c6: #3a9a9a; --c7: #6b7280;
  --p0: #3d8b57; --p1: #3a9fc0; --p2: #dfae3c; --p3: #6d6fc4; --heat: #1f6f8b;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #15181c; --card: #1d2126; --ink: #e6e6e3; --soft: #9aa3ad; --faint: #30363d; --accent: #7db7e0;
    --good: #6cc287; --warn: #e0a34a; --bad: #f2877e;
    --c0: #7db7e0; --c1: #f0a35e; --c2: #7fcf9a; --c3: #d092d8; --c4: #f08794; --c5: #cdbb72;
    --c6: #73cfcf; --c7: #a3abb5;
    --p0: #5aa873; --p1: #56b3d0; --p2: #d3a544; --p3: #8c8edb; --heat: #7fd0ea;
  }
}
"""

CHARTS = """
.chart text { fill: var(--soft); font: 12px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; }
.chart .tick { font-variant-numeric: tabular-nums; }
.chart .leveltext, .chart .lane { fill: var(--ink); }
.grid { stroke: var(--faint); } .axis { stroke: var(--soft); } .level { stroke: var(--ink); stroke-dasharray: 2 4; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.dot { opacity: 0; } .dot:hover { opacity: 1; } .alone { opacity: 1; }
.span.up { fill: var(--p0); opacity: .75; } .span.launch { fill: var(--p2); opacity: .75; }
.span.run { fill: var(--c7); opacity: .35; }
.heat, .best, .hollow { stroke: var(--faint); } .hollow { fill: none; stroke-dasharray: 3 4; }
.best { stroke: var(--good); stroke-width: 3; } .chart .strong { fill: var(--page); font-weight: 600; }
.chart .halo { paint-order: stroke; stroke: var(--card); stroke-width: 5px; stroke-linejoin: round; }
.mark { stroke: var(--card); stroke-width: 1.5; }
.mark.error { fill: var(--bad); } .mark.warning { fill: var(--warn); } .mark.info { fill: var(--accent); }
"""

PAGE = """
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 1060px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 30px; line-height: 1.2; margin: 0; letter-spacing: -0.01em; }
h2 { font-size: 19px; margin: 44px 0 12px; }
h3 { font-size: 15px; margin: 0 0 4px; font-weight: 600; }
p { margin: 8px 0; }
.lead { font-size: 18px; max-width: 46em; margin-top: 12px; }
.soft { color: var(--soft); }
.empty { color: var(--soft); font-style: italic; }
.title { display: flex; align-items: baseline; gap: 14px; flex-wrap: wrap; }
.pill { font-size: 14px; font-weight: 600; padding: 2px 12px; border-radius: 999px; border: 1.5px solid currentColor; }
.finished { color: var(--good); } .stopped, .running { color: var(--warn); } .failed { color: var(--bad); }
td.diverged, td.refused, td.failed { color: var(--bad); } td.halted { color: var(--warn); }
tr.best td { font-weight: 600; background: color-mix(in srgb, var(--good) 12%, transparent); }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(180px, 1fr)); gap: 12px; margin-top: 26px; }
.tile, .card { background: var(--card); border: 1px solid var(--faint); border-radius: 10px; }
.tile { padding: 12px 16px; }
.tile b { display: block; font-size: 22px; line-height: 1.25; font-weight: 650; font-variant-numeric: tabular-nums; }
.tile span { display: block; line-height: 1.4; color: var(--soft); font-size: 13px; }
.card { padding: 18px 20px; margin-bottom: 14px; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 14px; }
.pair .card { margin: 0; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 13.5px; color: var(--soft); margin: 2px 0 8px; }
.legend i { display: inline-block; width: 14px; height: 4px; border-radius: 2px; margin-right: 6px; }
.legend i { vertical-align: middle; } .legend i.box { height: 11px; width: 11px; }
.chart { display: block; width: 100%; height: auto; overflow: visible; }
.wide .chart { min-width: 640px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14.5px; }
th { text-align: left; font-weight: 600; color: var(--soft); font-size: 13px; }
th, td { padding: 6px 14px 6px 0; border-bottom: 1px solid var(--faint); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
td.n, th.n { text-align: right; } td.n, td.t { white-space: nowrap; } td.t { color: var(--soft); }
td.warning { color: var(--warn); } td.error { color: var(--bad); }
.scroll { overflow-x: auto; }
pre { font: 13px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
pre { margin: 0; overflow-x: auto; }
pre.text { white-space: pre-wrap; overflow-wrap: anywhere; }
details { background: var(--card); border: 1px solid var(--faint); border-radius: 10px; }
details { padding: 10px 20px; margin: 10px 0; }
summary { cursor: pointer; font-weight: 600; }
details > pre, details > div { margin: 12px 0 8px; }
.tabs > input { position: absolute; opacity: 0; }
.tabs > label { cursor: pointer; font-size: 13.5px; color: var(--soft); }
.tabs > label { padding: 3px 12px; border-radius: 6px; margin-right: 4px; }
.tabs > input:checked + label { background: var(--faint); color: var(--ink); }
.tabs > input:focus-visible + label { outline: 2px solid var(--accent); }
.tabs > div { display: none; margin-top: 12px; }
.tabs > input:nth-of-type(1):checked ~ div:nth-of-type(1), .tabs > input:nth-of-type(2):checked ~ div:nth-of-type(2) {
  display: block;
}
footer { margin-top: 48px; font-size: 13px; color: var(--soft); overflow-wrap: anywhere; }
@media (max-width: 520px) { .pair { grid-template-columns: 1fr; } main { padding: 24px 14px; } }
@media print { .tabs > div { display: block; } }
"""

STYLE = PALETTE + PAGE + CHARTS
