CREATE STREAMING TABLE readings
COMMENT 'Temperatures of the presses, by the topic plant/<device>/telemetry.'
AS SELECT
  split_part(topic, '/', 2) AS device,
  timestamp AS store_time,
  try_cast(get_json_object(CAST(payload AS string), '$.temperature') AS double) AS temperature
FROM STREAM messages
WHERE topic LIKE 'plant/%/telemetry';

CREATE MATERIALIZED VIEW device_minutes
COMMENT 'Mean temperature of each device and minute.'
AS SELECT
  device,
  date_trunc('minute', store_time) AS window_start,
  count(*) AS readings,
  avg(temperature) AS mean
FROM readings
GROUP BY device, date_trunc('minute', store_time);
