"""What schemathesis is told beside the published schema: which model is there, and to ask for short answers.

Without the first, nearly every case is a 404; without the second, most of the time is the model's.
"""

import schemathesis

MODEL, MOST = "storyteller-draft", {"max_tokens": 8, "max_completion_tokens": 8, "n": 4}


@schemathesis.hook
def before_load_schema(context, raw_schema):
    for schema in raw_schema["components"]["schemas"].values():
        fields = schema.get("properties", {})
        if "prompt" in fields or "messages" in fields:
            if "model" in fields:
                fields["model"] = {"const": MODEL}
            for name, most in MOST.items():
                for kind in fields.get(name, {}).get("anyOf", ()):
                    if kind.get("type") == "integer":
                        kind["maximum"] = most
