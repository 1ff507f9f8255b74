"""How often the first, second, ... draft stands: at all, and if the ones before it did.

python articles/figures/16_acceptance.py      # writes 16_acceptance.svg, from part16_speculation.json
"""

from drawing import bare, plt, result, save


def main() -> None:
    one = result("part16_speculation")["figures"]["one"]
    at, reached = one["accepted_at"], one["accepted_if_reached"]
    places = list(range(1, len(at) + 1))
    figure, ax = plt.subplots(figsize=(6.6, 3.4), layout="constrained")
    ax.bar(places, at, 0.6, color="#0f766e", label="stands")
    ax.plot(places, reached, "o-", color="#b45309", label="stands, if those before it did")
    for x, share in zip(places, at, strict=True):
        ax.text(x, share / 2, f"{share:.0%}", ha="center", va="center", color="white", fontsize=9)
    ax.set(
        xlabel="place among the drafts of a step", ylabel="share of the drafts", ylim=(0, 1), xticks=places
    )
    ax.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    bare(ax)
    save(figure, __file__)


if __name__ == "__main__":
    main()
