"""Style beyond Streamlit's options: colours that follow the theme, tables, bars, and less white space."""

from __future__ import annotations

from typing import Final

#: Blue and vermilion of the figures, in shades readable on both backgrounds (contrast of at least 4.5).
STYLE: Final = """<style>
.stMainBlockContainer { padding: 3.5rem 2rem 2rem; max-width: 1500px; }
.stMainBlockContainer h1 { font-size: 1.75rem; padding: 0 0 0.25rem; }
.stMainBlockContainer h2 { font-size: 1.25rem; padding: 0.5rem 0 0.25rem; }
.stMainBlockContainer h3 { font-size: 1.05rem; padding: 0.25rem 0; }
[data-testid=stCaptionContainer], [data-testid=stCaptionContainer] p { color: inherit; }
[data-testid=stCaptionContainer] { opacity: 0.85; }
[data-testid=stWidgetLabel], [data-testid=stWidgetLabel] p { color: inherit !important; }
.stMarkdown code, [data-testid=stCaptionContainer] code { color: inherit; }
.g-code { position: relative; border-radius: 0.5rem;
  background: color-mix(in srgb, currentColor 6%, transparent); }
.g-code pre { margin: 0; padding: 0.75rem 4.5rem 0.75rem 1rem; background: none; border: 0;
  white-space: pre-wrap; overflow-wrap: anywhere; }
.g-code code { padding: 0; background: none; color: inherit; font-size: 0.875rem; white-space: inherit; }
.g-code strong { font-weight: 700; } .g-code em { font-style: italic; }
.g-code button { position: absolute; top: 0.4rem; right: 0.4rem; padding: 0.15rem 0.5rem; font: inherit;
  font-size: 0.8rem; color: inherit; background: transparent; cursor: pointer; border-radius: 0.25rem;
  border: 1px solid color-mix(in srgb, currentColor 35%, transparent); }
.g-code button:hover, .g-code button:focus-visible { border-color: currentColor; }
[data-testid=stMultiSelect] [data-tag], [data-testid=stMultiSelect] [data-tag] *,
[data-testid=stBaseButton-primary]:enabled p { color: light-dark(#FFFFFF, #14181D) !important; }
[data-testid=stSidebarNavSeparator] { margin: 0.25rem 0; }
[data-testid=stMetricValue] { font-size: 1.5rem; }
[data-testid=stMetricDelta], [data-testid=stMetricDelta] div { white-space: normal; overflow: visible; }
.g-step { margin: 0; opacity: 0.85; overflow-wrap: anywhere; }
.g-answer { border-left: 0.35rem solid; padding: 0.75rem 1rem; border-radius: 0.25rem; font-size: 1.15rem;
  background: color-mix(in srgb, currentColor 6%, transparent); }
.g-answer.yes { border-color: #009E73; } .g-answer.no { border-color: #7A7A7A; }
.g-answer.trend { border-color: #E69F00; }
.g-answer p { margin: 0; } .g-answer p + p { margin-top: 0.35rem; font-size: 1rem; }
.g-table { overflow-x: auto; }
.g-table table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
.g-table th, .g-table td { text-align: left; padding: 0.4rem 0.6rem; vertical-align: top; font-weight: 400;
  border-bottom: 1px solid color-mix(in srgb, currentColor 15%, transparent); overflow-wrap: anywhere; }
.g-table thead th { font-weight: 600; font-size: 0.9rem; vertical-align: bottom; }
.g-table .num { text-align: right; white-space: nowrap; }
.g-table tr.best > * { font-weight: 700; background: color-mix(in srgb, #009E73 12%, transparent); }
.g-table tr.best .g-takes { font-weight: 400; }
.g-takes { font-size: 0.9rem; opacity: 0.85; }
.g-bar { height: 0.5rem; margin-top: 0.3rem; border-radius: 0.1rem; background: #7A7A7A; min-width: 2px; }
.g-bar.gain, tr.best .g-bar { background: #009E73; } .g-bar.loss { background: #D55E00; }
.g-bar.bound { background: transparent; border: 1px solid; }
.g-pieces { display: flex; height: 0.8rem; margin-top: 0.3rem; min-width: 6rem; }
.g-spans { position: relative; height: 0.8rem; margin-top: 0.3rem; min-width: 6rem; }
.g-span { position: absolute; height: 100%; }
.g-span.low { background: light-dark(#0072B2, #56B4E9); } .g-span.high { background: #D55E00; }
.g-mark { position: absolute; height: 100%; border-left: 2px solid; }
.g-heat table { width: auto; } .g-heat td { min-width: 3.5rem; }
.g-tag { font-size: 0.8rem; font-weight: 600; border: 1px solid; border-radius: 0.6rem; padding: 0 0.45rem;
  white-space: nowrap; }
.g-side { display: inline-block; padding: 0.05rem 0.5rem; margin: 0.1rem 0.35rem 0.1rem 0; border-radius: 0.25rem;
  border: 1px solid color-mix(in srgb, currentColor 35%, transparent); }
.g-legend { display: flex; flex-wrap: wrap; gap: 0.25rem 1rem; font-size: 0.9rem; }
.g-legend span { display: inline-flex; align-items: center; gap: 0.35rem; }
.g-legend i { width: 0.9rem; height: 0.7rem; display: inline-block; border: 1px solid transparent; }
.g-legend b { font-weight: 400; line-height: 1; }
.g-glyph { display: block; height: 64px; max-width: 100%; }
.st-key-upload [data-testid=stFileUploaderDropzone] button { background: light-dark(#0072B2, #56B4E9);
  color: light-dark(#FFFFFF, #14181D); border-color: transparent; }
.g-parts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); gap: 1rem 2rem; }
@media (max-width: 640px) {
  .stMainBlockContainer { padding: 4.25rem 1rem 1.5rem; }
  .g-stack thead { position: absolute; clip-path: inset(50%); height: 1px; width: 1px; overflow: hidden; }
  .g-stack table, .g-stack tbody, .g-stack tr, .g-stack th, .g-stack td { display: block; border: 0; }
  .g-stack tr { border-bottom: 1px solid color-mix(in srgb, currentColor 25%, transparent); padding: 0.4rem 0; }
  .g-stack td { display: flex; justify-content: space-between; gap: 1rem; flex-wrap: wrap; }
  .g-stack td::before { content: attr(data-label); opacity: 0.8; font-weight: 400; }
  .g-stack td:empty { display: none; }
  .stMainBlockContainer h1 { font-size: 1.4rem; }
  .g-answer { font-size: 1.05rem; }
  .g-table th, .g-table td { padding: 0.35rem 0.35rem; }
}
</style>"""
