-- Give the mutex back, if it is still ours.
--
-- KEYS  1 lock  2 ended attempts
-- ARGV  1 token  2 how long the attempt is known to have ended, ms  3 how many such attempts are known
--
-- Returns 1 released, also if an earlier try has done it and its reply was lost; 0 not ours.
--
-- Those that are the first to be forgotten are so when there are too many.

local time = redis.call('TIME')
local ms = math.floor((tonumber(time[1]) * 1000000 + tonumber(time[2])) / 1000)
if redis.call('GET', KEYS[1]) == ARGV[1] then
  redis.call('DEL', KEYS[1])
  pcall(function() -- it is released also where this cannot be written
    local life = math.max(redis.call('PTTL', KEYS[2]), ARGV[2])
    redis.call('PEXPIRE', KEYS[2], life) -- if this right is missing, nothing is to be left without an end
    redis.call('ZADD', KEYS[2], string.format('%.0f', ms + ARGV[2]), ARGV[1])
    redis.call('PEXPIRE', KEYS[2], life)
    redis.call('ZREMRANGEBYRANK', KEYS[2], 0, -1 - ARGV[3])
  end)
  return 1
end
-- A write, so that a replica does not answer: what it knows may be old.
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', string.format('%.0f', ms))
return redis.call('ZSCORE', KEYS[2], ARGV[1]) and 1 or 0
