"""Speed against acceptance, measured and by the formula, for three drafts a step.

python articles/figures/16_speed.py      # writes 16_speed.svg, from part16_speculation.json
"""

from drawing import bare, plt, result, save


def main() -> None:
    found = result("part16_speculation")
    ms, points, k = (
        found["figures"]["ms"],
        found["figures"]["acceptance"],
        found["workload"]["drafts_looked_at"],
    )
    alphas = [i / 100 for i in range(101)]

    def gain(alpha: float, rows: float, drafts: float) -> float:
        step = ms["fixed_with_drafts"] + rows + drafts * ms["draft"]
        return sum(alpha**j for j in range(k + 1)) * (ms["fixed"] + ms["rows_1"]) / step

    figure, ax = plt.subplots(figsize=(7.6, 4.2), layout="constrained")
    rows = ms[f"rows_{k + 1}"]
    ax.plot(alphas, [gain(a, rows, k) for a in alphas], color="#0f766e", label="the formula")
    ax.plot(
        alphas,
        [gain(a, ms["rows_1"], k) for a in alphas],
        color="#94a3b8",
        ls="--",
        label="if rows cost nothing",
    )
    ax.plot([p["alpha"] for p in points], [p["gain"] for p in points], "o", color="#b45309", label="measured")
    ax.axhline(1, color="#334155", lw=0.8, ls=":")
    ax.text(0.005, 1.02, "as fast as without drafts", fontsize=8.5, color="#334155")
    ax.set(
        xlabel="acceptance α: how often a draft stands, if those before it did", xlim=(0, 1), ylim=(0, None)
    )
    ax.set_ylabel("times as fast as without drafts")
    ax.legend(frameon=False, loc="upper left")
    bare(ax)
    save(figure, __file__)


if __name__ == "__main__":
    main()
