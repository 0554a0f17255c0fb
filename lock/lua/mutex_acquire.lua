-- Take the mutex, if nobody holds it.
--
-- KEYS  1 lock  2 fence  3 tombstone of this attempt
-- ARGV  1 token  2 life of the lease, ms  3 life of the fence, ms
--
-- Returns the fence if it is held (asking again with the same token says so again), else {state, number}
--   busy    number = what is left of the holder's lease, ms
--   refused this attempt was abandoned, or has been released, before it arrived
--
-- The lock key holds the token of the holder. The last fence is the holder's while there is one. It is the server's
-- clock in µs, or one more than the one before: it grows also when Redis has lost it, as far as the clock does.

if redis.call('EXISTS', KEYS[3]) == 1 then return {'refused', 0} end
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then
  local left = redis.call('PTTL', KEYS[1])
  if left == -1 then return redis.error_reply('FOREIGN the key has no expiry, so it is no lock of ours') end
  return {'busy', math.max(left, 0)}
end
local last = tonumber(redis.call('GET', KEYS[2]) or 0)
if not last then return redis.error_reply('FOREIGN the key of the fence holds something else') end
if holder and last > 0 then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return last
end

local time = redis.call('TIME')
local fence = math.max(last + 1, time[1] * 1000000 + time[2])
redis.call('SET', KEYS[2], fence, 'PX', ARGV[3])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return fence
