"""The picture of the rooms says what the imports say."""

import re
from xml.etree import ElementTree

from tools.draw_rooms import draw

CONTRACTS = {"low": "What lies below & lasts.", "high": "What stands on `low`."}


def test_a_room_has_its_box_and_an_import_its_dot_in_the_row_of_who_imports():
    picture = draw(CONTRACTS, [("high", "low")])
    words = [node.text for node in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert words[2:] == ["low", "What lies below & lasts.", "low", "high", "What stands on low.", "high"]
    ((kind, row),) = re.findall(r'<circle class="(\w+)" .* cy="(\d+)"', picture)
    height = re.search(r'<text x="\d+" y="(\d+)" class="name">high<', picture)
    assert kind == "dot"
    assert int(row) == int(height[1]) - 4, "the dot stands in the row of `high`"


def test_an_import_of_a_room_above_is_red():
    assert '<circle class="upwards"' in draw(CONTRACTS, [("low", "high")])
