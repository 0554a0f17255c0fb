-- Give the place back, if it is still ours.
--
-- KEYS  1 holders  2 tombstone of this attempt  3 details
-- ARGV  1 token  2 life of the tombstone, ms
--
-- Returns 1 released, also if an earlier try has done it and its reply was lost; 0 not ours.

local ends = tonumber(redis.call('ZSCORE', KEYS[1], ARGV[1]))
local time = redis.call('TIME')
local ms = math.floor((tonumber(time[1]) * 1000000 + tonumber(time[2])) / 1000)
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[3], ARGV[1])
if redis.call('ZCARD', KEYS[1]) == 0 then redis.call('DEL', KEYS[3]) end
if ends and ends > ms then
  redis.pcall('SET', KEYS[2], 'released', 'PX', ARGV[2])
  return 1
end
if redis.call('GET', KEYS[2]) == 'released' then return 1 end
return 0
