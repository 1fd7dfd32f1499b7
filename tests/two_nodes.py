"""Two Ray nodes on loopback: ``python two_nodes.py DASHBOARD_PORT TEMPORARY_FOLDER``.

Says when they are there. A line on standard input kills the second node, the end of it both.
"""

import sys

from ray.cluster_utils import Cluster

here = {"node_ip_address": "127.0.0.1", "temp_dir": sys.argv[2], "num_cpus": 1}
dashboard = {"include_dashboard": True, "dashboard_host": "127.0.0.1"}
dashboard |= {"dashboard_port": int(sys.argv[1])}
cluster = Cluster(initialize_head=True, head_node_args={**here, **dashboard})
second = cluster.add_node(**here)
print("two nodes", flush=True)
for _ in sys.stdin:
    cluster.remove_node(second, allow_graceful=False)
    print("one node", flush=True)
cluster.shutdown()
