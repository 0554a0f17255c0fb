-- Give the place back, if it is still ours.
--
-- KEYS  1 holders  2 ended attempts  3 details
-- ARGV  1 token  2 how long the attempt is known to have ended, ms  3 how many such attempts are known
--
-- Returns 1 released, also if an earlier try has done it and its reply was lost; 0 not ours.

local ends = tonumber(redis.call('ZSCORE', KEYS[1], ARGV[1]))
local time = redis.call('TIME')
local ms = math.floor((tonumber(time[1]) * 1000000 + tonumber(time[2])) / 1000)
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[3], ARGV[1])
if redis.call('ZCARD', KEYS[1]) == 0 then redis.call('DEL', KEYS[3]) end
if ends and ends > ms then
  pcall(function() -- it is released also where this cannot be written
    local life = math.max(redis.call('PTTL', KEYS[2]), ARGV[2])
    redis.call('PEXPIRE', KEYS[2], life) -- if this right is missing, nothing is to be left without an end
    redis.call('ZADD', KEYS[2], string.format('%.0f', ms + ARGV[2]), ARGV[1])
    redis.call('PEXPIRE', KEYS[2], life)
    redis.call('ZREMRANGEBYRANK', KEYS[2], 0, -1 - ARGV[3])
  end)
  return 1
end
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', string.format('%.0f', ms))
return redis.call('ZSCORE', KEYS[2], ARGV[1]) and 1 or 0
