"""What schemathesis is told beside the published schema: which model is there. Else nearly all are a 404."""

import schemathesis

MODEL = "storyteller-draft"


@schemathesis.hook
def before_load_schema(context, raw_schema):
    for schema in raw_schema["components"]["schemas"].values():
        fields = schema.get("properties", {})
        if "model" in fields and ("prompt" in fields or "messages" in fields):
            fields["model"] = {"const": MODEL}
