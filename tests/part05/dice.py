"""Are counted draws those of fair dice?"""

# chi-squared beyond which a fair draw comes once in a thousand, by degrees of freedom
CRITICAL = {9: 27.88, 19: 43.82, 99: 148.23}
N = 20_000  # draws


def chi_squared(observed, expected) -> float:
    return sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
