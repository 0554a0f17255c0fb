-- Take the mutex, if nobody holds it.
--
-- KEYS  1 lock  2 fence  3 tombstone of this attempt
-- ARGV  1 token  2 life of the lease, ms  3 life of the fence, ms
--
-- Returns {state, number}
--   held    number = the fence (asking again with the same token says so again)
--   busy    number = what is left of the holder's lease, ms
--   refused this attempt was abandoned, or has been released, before it arrived
--
-- The lock key holds the token and the fence of the holder. The fence is the server's clock in µs, or one more
-- than the last one: it grows also when Redis has lost it, as far as the clock does.

if redis.call('EXISTS', KEYS[3]) == 1 then return {'refused', 0} end
local holder = redis.call('GET', KEYS[1])
if holder then
  if string.sub(holder, 1, 26) == ARGV[1] then
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
    return {'held', tonumber(string.sub(holder, 27))}
  end
  local left = redis.call('PTTL', KEYS[1])
  if left == -1 then return redis.error_reply('FOREIGN the key has no expiry, so it is no lock of ours') end
  return {'busy', math.max(left, 0)}
end

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local last = tonumber(redis.call('GET', KEYS[2]) or 0)
if not last then return redis.error_reply('FOREIGN the key of the fence holds something else') end
local fence = math.max(last + 1, now)
local text = string.format('%.0f', fence)
redis.call('SET', KEYS[2], text, 'PX', ARGV[3])
redis.call('SET', KEYS[1], ARGV[1] .. text, 'PX', ARGV[2])
return {'held', fence}
