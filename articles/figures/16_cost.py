"""Where the time of a step goes: plain, and with one, three and five drafts; and what it brings.

python articles/figures/16_cost.py      # writes 16_cost.svg, from part16_speculation.json
"""

from drawing import bare, plt, result, save

DRAFTS = (0, 1, 3, 5)
DRAFT, VERIFY, REST = "#fcd34d", "#0f766e", "#cbd5e1"


def main() -> None:
    figures = result("part16_speculation")["figures"]
    ms, tokens = figures["ms"], figures["one"]["tokens_per_step"]
    figure, ax = plt.subplots(figsize=(8.6, 3), layout="constrained")
    for place, k in enumerate(DRAFTS):
        end = 0.0
        for _ in range(k):
            ax.barh(place, ms["draft"], 0.55, end, color=DRAFT, edgecolor="white")
            end += ms["draft"]
        ax.barh(place, ms[f"rows_{k + 1}"], 0.55, end, color=VERIFY)
        words = "a row" if k == 0 else f"{k + 1} rows"
        ax.text(end + ms[f"rows_{k + 1}"] / 2, place, words, ha="center", va="center", color="w", fontsize=9)
        end += ms[f"rows_{k + 1}"]
        rest = ms["fixed_with_drafts"] if k else ms["fixed"]
        ax.barh(place, rest, 0.55, end, color=REST)
        brought = 1 if k == 0 else tokens[f"{k} drafts"]
        ax.text(end + rest + 0.1, place, f"{brought:.2f} tokens", va="center", fontsize=9)
    for colour, words in (
        (DRAFT, "a pass of the draft model, D"),
        (VERIFY, "the target's pass, V"),
        (REST, "the rest, F or F′"),
    ):
        ax.barh(0, 0, color=colour, label=words)
    ax.set_yticks(range(len(DRAFTS)), ["no drafts", *(f"{k} draft{'s' * (k > 1)}" for k in DRAFTS[1:])])
    ax.invert_yaxis()
    ax.set_xlabel("ms of a step")
    ax.set_xlim(0, 1.2 * (ms["rows_6"] + 5 * ms["draft"] + ms["fixed_with_drafts"]))
    ax.legend(frameon=False, loc="upper right")
    bare(ax)
    save(figure, __file__)


if __name__ == "__main__":
    main()
