"""Load on a server of the OpenAI API, and the latencies that its clients see. It loads no model itself.

`workload.py` makes requests, `driver.py` sends them on time, `openai_api.py` follows the answers that come
through `http_client.py`. `metrics.py` computes figures from their times, `report.py` shows them.
"""
