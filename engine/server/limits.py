"""A server's limits: on what one request may have, on what is under way at once, and on times. Part 4.

How many stops, biases, choices and tools a request may have is as in OpenAI's API. Two limits bound a
prompt's length: the size of the body here, and the model's `max_positions`.
"""

# Of one request.
MAX_BODY_BYTES = 2**20  # about 200,000 words
LARGE_BODY_BYTES = 2**14  # larger bodies are parsed one at a time (`BodyLimit`)
MAX_CHUNKS = 1024  # of one body in chunked encoding; each chunk costs as much as a small read
MAX_BYTES_AHEAD = 2**18  # of a client's next request, accepted before its current one is answered
MAX_PROMPTS = 128  # in one request
MAX_CHOICES = 128  # of one request: prompts × n; each choice is a sequence
MAX_STOPS = 4  # stop strings of one request
MAX_STOP_CHARACTERS = 64  # of one stop string; every new text is searched for all stop strings
MAX_STOP_TOKEN_IDS = 128  # in one request
MAX_BAD_WORDS = 128  # in one request
MAX_BAD_WORD_CHARACTERS = 64  # of one bad word
MAX_LOGIT_BIAS = 300  # tokens in one request
MAX_NAME_CHARACTERS = 256  # of model, user, cache_salt
PLAIN_ID = "[A-Za-z0-9._-]{1,128}"  # a request's id, if a client chooses it
MAX_MESSAGES = 2048  # in one conversation (Part 14)
MAX_TEXT_PARTS = 128  # in one message
MAX_METADATA = 16  # entries of a chat's metadata
MAX_METADATA_CHARACTERS = 512  # of a value there
MAX_TEMPLATE_KWARGS_CHARACTERS = 2**14  # of a chat template's variables, as JSON
MAX_TOOLS = 128  # of one request (Part 14)
MAX_TOOL_CHARACTERS = 2**15  # of a tool's JSON schema, and of its description
MAX_CALLS = 128  # in one message of a conversation
MAX_JSON_DEPTH = 64  # levels of nesting of a tool's schema, and of the arguments of a call
TOOL_NAME = "^[A-Za-z0-9_-]{1,64}$"  # OpenAI's names of functions
MAX_PRIORITY = 2  # from -2 to 2; clients may choose only if the operator allows it
MAX_MESSAGE_CHARACTERS = 500  # of an error message, which may quote a long value

# Of the whole server.
MAX_REQUESTS = 1000  # under way at once; the next one gets a 503
MAX_LOADS = 16  # of adapters, under way or waiting; the next one gets a 429 (Part 18)
MAX_WATCHERS = 8  # of the page /engine; the next one gets a 429 (Part 12)
MAX_CONNECTIONS = 2000  # fewer if the process may open fewer files (`run.max_connections`)

# Times.
REQUEST_SECONDS = 20  # to send a request, counted from the connection or from the last answer
STALL_SECONDS = 30  # after which a client that reads nothing of its answer is cut off
SHUTDOWN_SECONDS = 10  # for the answers under way, after Ctrl-C or SIGTERM
TURN_SECONDS = 0.005  # the longest that one answer is written before other answers have their turn
SWITCH_SECONDS = 0.0005  # after which a Python thread must let another thread run (`run.serve`)
