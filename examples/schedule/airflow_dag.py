"""The tables of a lake by Airflow (3.0 or newer): bronze, then silver and gold, then a check.

Each task is one run of `holdfast pipeline`. A task that is repeated goes on where the failed one
ended, so retries are safe. Copy the file into the folder of DAGs.
"""

from datetime import datetime, timedelta

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG

SOURCE = "broker-a:18083,broker-b:18083"
LAKE = "/var/lib/holdfast-lake"

with DAG(
    dag_id="holdfast_tables",
    schedule="*/10 * * * *",
    start_date=datetime(2026, 1, 1),
    catchup=False,  # a run takes all that is new, so an earlier one needs no repetition
    max_active_runs=1,  # a table has one writer at a time
    default_args={"retries": 3, "retry_delay": timedelta(minutes=1)},
    tags=["holdfast"],
) as dag:
    records = BashOperator(
        task_id="records",
        bash_command=f"holdfast pipeline run bronze --from {SOURCE} --lake {LAKE}",
    )
    tables = BashOperator(
        task_id="tables",
        bash_command=f"holdfast pipeline run silver gold --lake {LAKE}",
    )
    lag = BashOperator(
        task_id="lag",
        bash_command=f"holdfast pipeline status --lake {LAKE} --fail-if-lag 30m",
    )
    records >> tables >> lag
