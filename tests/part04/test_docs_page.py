"""The page /docs: what /openapi.json says, for people."""

import re
from html import unescape

from engine.server.app import create_app
from engine.server.docs_page import NOT_LISTED, docs_page
from tests.part04.serving import ScriptedBackend, client_of


def test_every_route_and_every_field_of_a_body_is_on_the_page():
    app = create_app(ScriptedBackend())
    page, description = docs_page(app.openapi(), {}), app.openapi()
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            about = f"<span>{operation['summary']}</span>"
            assert f"<b>{method.upper()}</b> <code>{path}</code> {about}" in page
    assert NOT_LISTED in page
    for name in description["components"]["schemas"]["CompletionRequest"]["properties"]:
        assert f'<th scope="row">{name}</th>' in page
    assert '<th scope="row">stream_options.include_usage</th><td>boolean or null</td>' in page
    assert '<th scope="row">choices[].finish_reason</th>' in page
    assert '<th scope="row">top_p</th><td>number (above 0, to 1) or null' in page
    assert re.search(r"prompt</th><td>[^<]*</td><td>required", page)


def test_what_a_description_says_is_text_and_no_markup():
    fields = {"properties": {"<b>": {"const": "</td><script>"}}, "required": ["<b>"]}
    body = {"content": {"application/json": {"schema": fields}}}
    route = {"post": {"summary": "<u>", "requestBody": body, "responses": {}}}
    page = docs_page({"info": {"title": "<t>"}, "paths": {"/<i>": route}}, {})
    assert not re.search(r"<(script|t|i|u)>", page)
    assert "</td><script>" in unescape(page)


def test_the_page_is_open_and_an_ordinary_page():
    with client_of(ScriptedBackend(), api_key="k") as client:
        answer = client.get("/docs")
        assert client.get("/openapi.json").status_code == 200
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")


def test_ping_is_health_and_version_says_which():
    backend = ScriptedBackend()
    with client_of(backend, api_key="k") as client:
        assert client.get("/ping").status_code == 200
        assert client.get("/version").status_code == 401
        version = client.get("/version", headers={"authorization": "Bearer k"}).json()["version"]
        assert re.match(r"\d+\.\d+|from a folder", version)
        backend.healthy = False
        assert client.get("/ping").status_code == 503


def test_which_routes_need_the_key_stands_in_the_description_and_on_the_page():
    with client_of(ScriptedBackend(), api_key="k") as client:
        described, page = client.get("/openapi.json").json(), client.get("/docs").text
        for path, operations in described["paths"].items():
            asked = client.request("get", path).status_code if "get" in operations else 401
            for operation in operations.values():
                needed = operation.get("security", described["security"])
                assert bool(needed) == (asked == 401), path
    assert described["security"] == [{"ApiKey": []}]
    assert described["components"]["securitySchemes"] == {"ApiKey": {"type": "http", "scheme": "bearer"}}
    rule = "Each route, but <code>/health</code>, <code>/ping</code> needs the header"
    assert f"{rule} <code>Authorization: Bearer KEY</code>." in page
    with client_of(ScriptedBackend()) as client:
        described, page = client.get("/openapi.json").json(), client.get("/docs").text
    assert "security" not in described
    assert "Authorization" not in page, "a server without a key asks for none"


def test_it_links_to_the_pages_that_there_are():
    def extension(app, backend):
        @app.get("/", include_in_schema=False)
        @app.get("/engine", include_in_schema=False)
        async def page():
            return "a page"

    with client_of(ScriptedBackend()) as client:
        assert "<nav" not in client.get("/docs").text
    with client_of(ScriptedBackend(), extensions=[extension], root_path="/llm") as client:
        page = client.get("/llm/docs").text
        links = re.findall(r'href="([^"]+)"', page)
        assert links == ["./", "engine", "openapi.json"]
        assert [client.get(f"/llm/{link.removeprefix('./')}").status_code for link in links] == [200] * 3
