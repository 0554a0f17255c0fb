-- Prolongs the lease if this token still holds a place, and the time for which its size counts. A lease
-- that has ended stays ended.
--
-- KEYS  1 holders  2 ended attempts  3 details
-- ARGV  1 token  2 life of the lease, ms  3 size
--
-- Returns 1 if the lease is prolonged, 0 if it is lost.

local ends = tonumber(redis.call('ZSCORE', KEYS[1], ARGV[1]))
local time = redis.call('TIME')
local ms = math.floor((tonumber(time[1]) * 1000000 + tonumber(time[2])) / 1000)
if not ends or ends <= ms then
  -- A write: a replica refuses it, since its data may be old.
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', 0)
  return 0
end
local last = tonumber(redis.call('ZRANGE', KEYS[1], -1, -1, 'WITHSCORES')[2])
last = string.format('%.0f', math.max(last, ms + ARGV[2]) + 60000)
-- First this: without memory Redis lets a script go on after a write that needs none.
redis.call('PEXPIREAT', KEYS[1], last)
redis.call('PEXPIREAT', KEYS[3], last)
redis.call('ZADD', KEYS[1], string.format('%.0f', math.max(ends, ms + ARGV[2])), ARGV[1])
local size = redis.pcall('HGET', KEYS[3], 'size') -- foreign details must not end the lease
if type(size) == 'string' and (tonumber(size) or 0) <= tonumber(ARGV[3]) then
  redis.call('HSET', KEYS[3], 'size', ARGV[3], 'sizeUntil', string.format('%.0f', ms + ARGV[2]))
end
return 1
