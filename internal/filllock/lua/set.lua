-- Write an entry, and invalidate a running load.
--
-- KEYS  1 value  2 lock
-- ARGV  1 entry  2 its TTL, ms
--
-- Returns 1.

redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
if redis.call('DEL', KEYS[2]) == 1 then wake(KEYS[2], '') end
return 1
