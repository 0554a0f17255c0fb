-- Releases the mutex if this token still holds it, and wakes a waiter.
--
-- KEYS  1 lock  2 ended attempts  3 reservation  4 waiting  5 fence
-- ARGV  1 token  2 life of the mark, ms  3 how many marks are kept
--       4 life of a reservation after a release, ms
--
-- Returns 1 if it is released, also by an earlier try whose reply was lost; 0 if this token does
-- not hold it.

local time = redis.call('TIME')
local ms = math.floor((tonumber(time[1]) * 1000000 + tonumber(time[2])) / 1000)
if redis.call('GET', KEYS[1]) == ARGV[1] then
  redis.call('DEL', KEYS[1])
  wakeNext(KEYS[1], KEYS[3], KEYS[4], ARGV[4], false)
  pcall(returned, redis.call, KEYS[5], ARGV[1])
  pcall(mark, redis.call, KEYS[2], ARGV[1], ms, ARGV[2], ARGV[3]) -- the release counts also without the mark
  return 1
end
-- A write: a replica refuses it, since its data may be old.
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', string.format('%.0f', ms))
return redis.call('ZSCORE', KEYS[2], ARGV[1]) and 1 or 0
