"""Every bound on what one client may send, or hold, or take its time over. Part 4.

Each is OpenAI's where OpenAI has one. A prompt's length is bounded by the body, then by the model.
"""

MAX_BODY_BYTES = 2**20  # some 200,000 words
LARGE_BODY_BYTES = 2**14  # of which one is read at a time
MAX_CHUNKS = 1024  # of a body that comes in chunks: each costs what a small read does
MAX_BYTES_AHEAD = 2**18  # that a client may send before it has the answer to what it sent
MAX_PROMPTS = 128  # in one request
MAX_CHOICES = 128  # prompts × n: each is a sequence of its own
MAX_STOPS = 4
MAX_STOP_CHARACTERS = 64  # each token is compared with all of them
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 300
MAX_NAME_CHARACTERS = 256  # of model, user, cache_salt
MAX_COMPLETION_LOGPROBS = 5  # likeliest tokens shown at each place (Part 10)
MAX_MESSAGES = 2048  # of one conversation (Part 14)
MAX_TEXT_PARTS = 128  # of one message
MAX_PRIORITY = 2  # -2 to 2, and only if the operator lets clients choose
MAX_MESSAGE_CHARACTERS = 500  # of an error, which may quote what it is about

MAX_REQUESTS = 1000  # under way at once; the next is a 503
MAX_LOADS = 16  # of adapters, under way or waiting for it (Part 18)
MAX_CONNECTIONS = 2000  # fewer if the system lends this process fewer files, or does not say (`run`)
REQUEST_SECONDS = 20  # to send a request, from the connection or the last answer on
STALL_SECONDS = 30  # for which a client may read nothing of its answer
SHUTDOWN_SECONDS = 10  # for answers under way, after Ctrl-C or SIGTERM
TURN_SECONDS = 0.005  # for which one answer may be written before others have their turn
SWITCH_SECONDS = 0.0005  # a thread that computes in Python, a tokenizer, hands the interpreter on
